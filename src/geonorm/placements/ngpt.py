"""nGPT: everything on the unit sphere, each step a learnable part of the chord to the output (arXiv 2410.01131)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from geonorm.errors import UserError, check_positive
from geonorm.placements.base import Connection, Learned, Norms, Placement, Site, Sublayer, unit_rms


@dataclasses.dataclass(frozen=True)
class NGPT(Placement):
    """``h <- n(h + lambda (n(f(h)) - h))`` with ``n(h) = h / |h|``: rows of length 1, no norm with a gain.

    Beside the connections, as in its paper's table 1: queries and keys at length 1 after rotation, times ``s_qk``,
    their products times sqrt(head_dim); the MLP's ``up`` times ``s_u``, its ``gate`` times ``s_v sqrt(d)`` (a MLP
    without a gate has ``s_v sqrt(d)`` alone); logits times ``s_z``; every weight brought back to rows (or columns, for
    what writes to the stream) of length 1 after each step of the optimiser. All scales start at 1. ``s_qk``, ``s_z``
    and the rate are stored times 1/sqrt(d), so that AdamW moves them, relative to their size, as fast as the entries of
    a row of length 1. Keys and queries share ``s_qk`` in the paper; its square stands on the query here, which with
    grouped keys gives every query head its own.

    Its authors train without warm-up and without weight decay.

    Options:
        rate: start of lambda, one number a channel and connection; the paper's 0.05, of the order of one over the
            number of layers.
    """

    name = "ngpt"
    final_norm = False
    weight_axes = {  # noqa: RUF012
        **dict.fromkeys(("embedding", "query", "key", "value", "mlp_input", "mlp_up", "head"), 1),
        **dict.fromkeys(("attention_output", "mlp_output"), 0),
    }

    rate: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("rate", self.rate)
        if self.norm is not None:
            raise UserError("`norm` is the kind of a placement's norms, and placement 'ngpt' has none; leave it out")

    def enter(self, h: Tensor) -> Tensor:
        """Put every token on the sphere of radius 1."""
        return unit_rows(h)

    def connection(self, site: Site) -> Connection:
        """Make the step for one sub-layer."""
        return ChordConnection(site.width, self.rate)

    def inside(self, place: str, size: int, dim: int, head_dim: int) -> Learned | None:
        """Scales of queries and keys, of the MLP's hidden features and of the logits."""
        slow = 1 / math.sqrt(dim)
        if place == "heads":
            return UnitHeads(size, head_dim, slow)
        if place == "mlp_up":
            return Scale(size, 1.0, 1.0)
        if place == "mlp_input":
            return Scale(size, 1.0, math.sqrt(dim))
        return Scale(size, slow, 1 / slow) if place == "head" else None


class Scale(Learned):
    """One learnable number a feature, stored at ``start`` and used times ``factor``."""

    def __init__(self, size: int, start: float, factor: float) -> None:
        super().__init__()
        self.start, self.factor = start, factor
        self.scale = nn.Parameter(torch.full((size,), start))

    def initial_value(self, name: str) -> float:
        """The stored start."""
        return self.start

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[..., size]``, scaled."""
        return features * (self.scale * self.factor).to(features.dtype)


class UnitHeads(Learned):
    """Queries and keys at length 1; the query times the square of ``s_qk``; products times sqrt(head_dim)."""

    def __init__(self, size: int, head_dim: int, stored: float) -> None:
        super().__init__()
        self.head_dim, self.stored = head_dim, stored
        self.scale = nn.Parameter(torch.full((size,), stored))

    def initial_value(self, name: str) -> float:
        """The stored start."""
        return self.stored

    def forward(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor, float]:
        """Return query and key ``[batch, heads, tokens, head_dim]`` and the factor on their products."""
        scale = (self.scale / self.stored).square().view(-1, 1, self.head_dim)
        return unit_rows(query) * scale.to(query.dtype), unit_rows(key), math.sqrt(self.head_dim)


class ChordConnection(Connection):
    """Moves the stream along the chord to the sub-layer's output at length 1, and back to the sphere."""

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.stored = 1 / math.sqrt(dim)
        self.factor = rate * math.sqrt(dim)
        self.rate = nn.Parameter(torch.full((dim,), self.stored))

    def initial_value(self, name: str) -> float:
        """The stored start of the rate."""
        return self.stored

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``n(h + |lambda| (n(f(h)) - h))``."""
        update = unit_rows(sublayer(stream))
        rate = (self.rate * self.factor).abs().to(stream.dtype)
        return unit_rows(stream + self.branch(rate * (update - stream)))


def unit_rows(h: Tensor) -> Tensor:
    """Bring each row ``[..., d]`` to length 1; a zero row stays zero."""
    return unit_rms(h) * (1 / math.sqrt(h.shape[-1]))
