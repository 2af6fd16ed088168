"""A placement ready for use in any PyTorch model: entry, connections, norms, exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.errors import check_count, unknown
from geonorm.placements.base import (
    SUBLAYERS,
    WEIGHT_ROLES,
    Connection,
    Placement,
    Role,
    Site,
    Sublayer,
    base_std,
)
from geonorm.placements.norm_kinds import NORM_KINDS
from geonorm.placements.registry import create

HEAD_PLACES = ("query", "key", "value", "heads")
PLACES = (*HEAD_PLACES, "mlp_input", "mlp_up", "head")


class WiredConnection(nn.Module):
    """A connection together with the norms it uses: ``forward(stream, sublayer) -> stream``."""

    def __init__(self, connection: Connection, norms: dict[str, nn.Module]) -> None:
        super().__init__()
        self.connection = connection
        self.norms = nn.ModuleDict(norms)

    def forward(self, stream: Any, sublayer: Sublayer) -> Any:
        """Return the stream after ``sublayer``, a callable from ``[..., d]`` to ``[..., d]``."""
        return self.connection(stream, sublayer, self.norms)


class Wiring(nn.Module):
    """Everything a placement adds to a model of ``num_layers`` layers with an attention and an MLP each.

    Args:
        placement: a name from :func:`geonorm.placements.available`, or a placement.
        dim: width d of the stream.
        num_layers: number of layers; there are twice as many connections, attention before MLP.
        norm: kind of every norm, the option of that name, or what makes a norm from the width; RMSNorm with a gain and
            eps 1e-6 by default.
        options: the placement's options.

    Attributes:
        connections: ``2 * num_layers`` modules, each called as ``stream = connection(stream, sublayer)``.

    Raises:
        UserError: unknown placement or option, or a size that is not a positive whole number.
    """

    def __init__(
        self,
        placement: str | Placement,
        dim: int,
        num_layers: int,
        *,
        norm: str | Callable[[int], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.placement = create(placement, **options, **({} if norm is None or callable(norm) else {"norm": norm}))
        self.dim = check_count("dim", dim)
        self.num_layers = check_count("num_layers", num_layers)
        make = norm if callable(norm) else NORM_KINDS[self.placement.norm or "rmsnorm"]
        sites = [Site(layer, sublayer, num_layers, dim) for layer in range(1, num_layers + 1) for sublayer in SUBLAYERS]
        self.connections = nn.ModuleList(
            WiredConnection(self.placement.connect(site), {slot: make(dim) for slot in self.placement.slots(site)})
            for site in sites
        )
        self.exit_module = self.placement.exit_module(dim)
        self.exit_norms = nn.ModuleDict({slot: make(dim) for slot in self.placement.exit_norms})
        self.final_norm = make(dim) if self.placement.final_norm else nn.Identity()

    def enter(self, h: Tensor) -> Any:
        """Make the stream from the token embeddings ``[..., d]``."""
        return self.placement.open(h)

    def exit(self, stream: Any) -> Tensor:
        """Return what the head reads, ``[..., d]``: the stream after the final norm, where there is one."""
        return self.final_norm(self.placement.close(stream, self.exit_module, self.exit_norms))  # type: ignore[arg-type]

    def inside(self, place: str, size: int, head_dim: int = 0) -> nn.Module:
        """Make the module that the placement puts inside a sub-layer or on the logits, for one place in the model.

        Args:
            place: ``"query"``, ``"key"``, ``"value"``, ``"mlp_input"``, ``"mlp_up"`` or ``"head"``: call it on what
                that projection returns, ``[..., size]``; ``"heads"``: call it as
                ``query, key, scaling = module(query, key, scaling)`` after any rotation, with rows
                ``[..., heads, tokens, head_dim]``.
            size: number of features; for ``"heads"`` those of all query heads.
            head_dim: width of a head, for the places in attention.

        Returns:
            The module; for most placements one that changes nothing.

        Raises:
            UserError: unknown place, or a size that is not a positive whole number.
        """
        if place not in PLACES:
            raise unknown("place", place, PLACES)
        made = self.placement.inside(place, check_count("size", size), self.dim, head_dim)
        if made is not None and place in HEAD_PLACES:
            check_count("head_dim", head_dim)
        return made or (UnchangedHeads() if place == "heads" else nn.Identity())

    @torch.no_grad()
    def normalize_(self, weight: Tensor, role: Role) -> Tensor:
        """Bring a weight ``[out, in]`` back to rows or columns of length 1, in place, where the placement keeps it so.

        To be called after each step of the optimiser.
        """
        axis = self.placement.weight_axes.get(role)
        if axis is not None:
            length = torch.linalg.vector_norm(weight, dim=axis, keepdim=True)
            weight.div_(torch.where(length > 0, length, 1.0))
        return weight

    @torch.no_grad()
    def init_(self, weight: Tensor, role: Role, layer: int | None = None) -> Tensor:
        """Draw a weight ``[out, in]`` in place by the placement's rule for its role.

        ``layer``, counted from 1, is asked for by mixtures, whose layers have rules of their own.

        Raises:
            UserError: unknown role, or a layer that the model does not have.
        """
        if role not in WEIGHT_ROLES:
            raise unknown("role", role, WEIGHT_ROLES)
        placement = self.placement
        if layer is not None:
            placement = placement.at(Site(layer, "attention", self.num_layers).layer, self.num_layers)
        rule = placement.init_rule(role, self.num_layers)
        return self.normalize_(weight.normal_(0.0, rule.std(weight.shape, base_std(self.dim))), role)


class UnchangedHeads(nn.Module):
    """Queries, keys and the factor on their products as they are."""

    def forward(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor, float]:
        """Return what was given."""
        return query, key, scaling
