"""A part of the way along the great circle to the normalised output: nGPT's step taken as a geodesic."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from geonorm import geometry
from geonorm.errors import UserError
from geonorm.placements.base import Connection, Norms, Placement, Site, Sublayer, unit_rms
from geonorm.schedules import step_sizes


@dataclasses.dataclass(frozen=True)
class Slerp(Placement):
    """``x`` moves the part alpha_k of the way along the great circle to ``f(x)`` brought to the sphere.

    With t the angle between x and f(x), the angle of the step is alpha_k t: the size of f(x) does not count. nGPT goes
    the same part along the chord and back to the sphere, a smaller angle for alpha below 1/2, see docs/math.md.
    By default sub-layer k goes 1/(2 sqrt(k)) of the way: with outputs at right angles to the stream about the angle
    ``atan(1/sqrt(k))`` of SandwichNorm. From 1, as in geonorm, the first attention would put its output in the place of
    the token.

    Options:
        alpha: part of the way at first, at most 1.
        decay: how the parts shrink with depth, see :func:`geonorm.schedules.step_sizes`.
        per: ``"layer"``: attention and MLP of layer k share alpha_k; ``"sublayer"``: they are counted apart.
    """

    name = "slerp"

    alpha: float = 0.5
    decay: str = "sqrt"
    per: Literal["layer", "sublayer"] = "sublayer"

    def __post_init__(self) -> None:
        super().__post_init__()
        step_sizes(self.decay, self.alpha, 1)
        if self.gain == "channel":
            raise UserError("placement 'slerp' multiplies an angle, one a row: take gain=scalar")
        if self.alpha > 1:
            raise UserError(f"`alpha` is a part of the way and must be at most 1, got {self.alpha}")
        if self.per not in ("layer", "sublayer"):
            raise UserError(f"`per` must be 'layer' or 'sublayer', got {self.per!r}")

    def enter(self, h: Tensor) -> Tensor:
        """Put every token on the sphere of radius sqrt(d)."""
        return unit_rms(h)

    def connection(self, site: Site) -> Connection:
        """Make the step for one sub-layer."""
        if self.per == "layer":
            return SlerpConnection(step_sizes(self.decay, self.alpha, site.num_layers)[site.layer - 1])
        return SlerpConnection(step_sizes(self.decay, self.alpha, 2 * site.num_layers)[site.number - 1])


class SlerpConnection(Connection):
    """Moves the stream the part ``alpha`` of the way to the sub-layer's output."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return the point at ``alpha`` times the angle; a zero row and one with no output across it stay."""
        update = sublayer(stream)
        dtype = torch.promote_types(torch.promote_types(stream.dtype, update.dtype), torch.float32)
        x, u = stream.to(dtype), update.to(dtype)
        # The size of the output does not count, so that a very small or large one is out of the way at once.
        u = u / geometry.row_scale(u)
        v, length = geometry.tangent(x, u), geometry.norm(x)
        across, along = geometry.norm(v), (u * x).sum(-1, keepdim=True) / torch.where(length > 0, length, 1.0)
        moves = (across > 0) & (length > 0)
        # atan2 has no derivative at (0, 0), and a row without a tangent part has no direction.
        across = torch.where(moves, across, 1.0)
        theta = self.alpha * torch.atan2(across, torch.where(moves, along, 1.0))
        theta = self.branch(theta)
        radius = math.sqrt(stream.shape[-1])
        y = torch.cos(theta) * unit_rms(x) + torch.sin(theta) * (radius / across) * v
        return torch.where(moves, y, x).to(stream.dtype)

    def extra_repr(self) -> str:
        """Part of the way."""
        return f"alpha={self.alpha:.4g}"
