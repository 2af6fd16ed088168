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
from geonorm.placements.registry import create


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
        norm: makes a norm from the width; RMSNorm with a gain and eps 1e-6 by default.
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
        norm: Callable[[int], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.placement = create(placement, **options)
        self.dim = check_count("dim", dim)
        self.num_layers = check_count("num_layers", num_layers)
        make = norm or (lambda width: nn.RMSNorm(width, eps=1e-6))
        self.connections = nn.ModuleList(
            WiredConnection(
                self.placement.connection(Site(layer, sublayer, num_layers)),
                {slot: make(dim) for slot in self.placement.norms},
            )
            for layer in range(1, num_layers + 1)
            for sublayer in SUBLAYERS
        )
        self.final_norm = make(dim) if self.placement.final_norm else nn.Identity()

    def enter(self, h: Tensor) -> Any:
        """Make the stream from the token embeddings ``[..., d]``."""
        return self.placement.enter(h)

    def exit(self, stream: Any) -> Tensor:
        """Return what the head reads, ``[..., d]``: the stream after the final norm, where there is one."""
        return self.final_norm(self.placement.exit(stream))

    @torch.no_grad()
    def init_(self, weight: Tensor, role: Role) -> Tensor:
        """Draw a weight ``[out, in]`` in place by the placement's rule for its role.

        Raises:
            UserError: unknown role.
        """
        if role not in WEIGHT_ROLES:
            raise unknown("role", role, WEIGHT_ROLES)
        rule = self.placement.init_rule(role, self.num_layers)
        return weight.normal_(0.0, rule.std(weight.shape, base_std(self.dim)))
