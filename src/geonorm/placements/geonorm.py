"""GeoNorm: the stream walks on a sphere, each sub-layer gives a direction (arXiv 2601.22095)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from geonorm.errors import UserError, check_positive
from geonorm.geometry import retraction_exponent, tangent
from geonorm.ops import sphere_step
from geonorm.placements.base import Connection, Norms, Placement, Site, Sublayer, check_flag, unit_rms
from geonorm.schedules import step_sizes

# Of t squared, where the shift of a shorter tangent part fades out.
_SMALLEST_SQUARE = 1e-8


@dataclasses.dataclass(frozen=True)
class GeoNorm(Placement):
    """``x <- step(x, f(x), alpha_k)`` on the sphere of radius sqrt(d); no norm, no trainable parameter by default.

    Options:
        alpha: step size of the first layer.
        decay: how steps shrink with depth, see :func:`geonorm.schedules.step_sizes`.
        per: ``"layer"``: attention and MLP of layer k share alpha_k; ``"sublayer"``: they are counted apart.
        retraction: ``"exponential"``, ``"projection"``, ``"cayley"`` or a positive number p.
        max_angle: upper limit of the angle that one step travels, in radians; None, as in every formula of the paper,
            for no limit. A row at the limit learns no length.
        max_update_angle: upper limit of ``t = |v| / |x|``, before the step size multiplies it; None for no limit. A
            public re-implementation of the paper limits this to pi/4, then scales and shifts it, then multiplies by the
            step size, then limits the product to pi/4 (``max_angle``).
        learnable_angle: a trainable scale and shift of t after its limit, ``alpha (scale t + shift)``: two parameters
            of shape ``[1]`` a connection that start at 1 and 0.
        learnable: one trainable alpha a connection (softplus of a parameter of shape ``[1]``).
        normalize_update: bring the sub-layer output to RMS 1 first, so that the angle is at most phi(alpha_k).
        alphas: the step size of every sub-layer, attention of layer 1 first, two a layer; in place of alpha, decay and
            per, which then keep their defaults. For a trained model whose steps follow no law.
    """

    name = "geonorm"

    alpha: float = 1.0
    decay: str = "harmonic"
    per: Literal["layer", "sublayer"] = "layer"
    retraction: str | float = "exponential"
    max_angle: float | None = None
    max_update_angle: float | None = None
    learnable_angle: bool = False
    learnable: bool = False
    normalize_update: bool = False
    alphas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        step_sizes(self.decay, self.alpha, 1)
        if retraction_exponent(self.retraction) == math.inf and self.retraction != "exponential":
            raise UserError("`retraction` with an infinite p is the exponential map; write 'exponential'")
        for name in ("max_angle", "max_update_angle"):
            if (limit := getattr(self, name)) is not None:
                check_positive(name, limit)
        if self.per not in ("layer", "sublayer"):
            raise UserError(f"`per` must be 'layer' or 'sublayer', got {self.per!r}")
        check_flag(self, "learnable", "learnable_angle", "normalize_update")
        if self.alphas is not None:
            object.__setattr__(self, "alphas", self._checked_alphas(self.alphas))

    def _checked_alphas(self, alphas: Any) -> tuple[float, ...]:
        if not isinstance(alphas, (list, tuple)) or not alphas or len(alphas) % 2:
            raise UserError(f"`alphas` must be a list of step sizes, two a layer, got {alphas!r}")
        for name in ("alpha", "decay", "per"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"`alphas` gives every step size itself; leave `{name}` out")
        return tuple(check_positive(f"alphas[{index}]", value) for index, value in enumerate(alphas))

    def options(self) -> dict[str, Any]:
        """Every option with its value, JSON-able: ``alphas`` is a list."""
        options = super().options()
        return options if self.alphas is None else {**options, "alphas": list(self.alphas)}

    def changed_options(self) -> dict[str, Any]:
        """The options that differ from their defaults; a list of step sizes by its length."""
        changed = super().changed_options()
        return changed if self.alphas is None else {**changed, "alphas": f"[{len(self.alphas)}]"}

    def enter(self, h: Tensor) -> Tensor:
        """Put every token on the sphere of radius sqrt(d)."""
        return unit_rms(h)

    def alpha_at(self, site: Site) -> float:
        """Step size at one site; the start value where it is learnable.

        Raises:
            UserError: ``alphas`` is for another number of layers.
        """
        index = 2 * (site.layer - 1) + (site.sublayer == "mlp")
        if self.alphas is not None:
            if len(self.alphas) != 2 * site.num_layers:
                raise UserError(
                    f"`alphas` has {len(self.alphas)} step sizes, but {site.num_layers} layers take "
                    f"{2 * site.num_layers}, two a layer"
                )
            return self.alphas[index]
        if self.per == "layer":
            return step_sizes(self.decay, self.alpha, site.num_layers)[site.layer - 1]
        return step_sizes(self.decay, self.alpha, 2 * site.num_layers)[index]

    def connection(self, site: Site) -> Connection:
        """Make the step for one sub-layer."""
        return SphereConnection(self, self.alpha_at(site))


class SphereConnection(Connection):
    """The step of one sub-layer; ``alpha`` is its step size now."""

    def __init__(self, placement: GeoNorm, alpha: float) -> None:
        super().__init__()
        self.initial_alpha = alpha
        self.retraction = placement.retraction
        self.max_angle = placement.max_angle
        self.max_update_angle = placement.max_update_angle
        self.normalize_update = placement.normalize_update
        # Shape [1], because sharded training rejects parameters without an axis.
        self.raw_alpha = nn.Parameter(torch.empty(1)) if placement.learnable else None
        self.angle_scale = nn.Parameter(torch.empty(1)) if placement.learnable_angle else None
        self.angle_shift = nn.Parameter(torch.empty(1)) if placement.learnable_angle else None
        self.reset_parameters()

    def initial_value(self, name: str) -> float:
        """Start value of a parameter; that of ``raw_alpha`` is the number whose softplus is the step size."""
        alpha = self.initial_alpha
        raw_alpha = alpha + math.log(-math.expm1(-alpha))
        return {"raw_alpha": raw_alpha, "angle_scale": 1.0, "angle_shift": 0.0}[name]

    @property
    def alpha(self) -> float | Tensor:
        """Step size: a number, or a tensor of shape ``[1]`` where it is learnable."""
        if self.raw_alpha is None:
            return self.initial_alpha
        return functional.softplus(self.raw_alpha.to(torch.promote_types(self.raw_alpha.dtype, torch.float32)))

    def stretch(self, square: Tensor) -> Tensor | float:
        """By how much the limit, the scale and the shift multiply a tangent part, given ``t^2``; smooth at 0."""
        factor: Tensor | float = 1.0
        if self.max_update_angle is not None:
            beyond = square > self.max_update_angle**2
            root = torch.where(beyond, square, 1.0).sqrt()
            factor = torch.where(beyond, self.max_update_angle / root, 1.0)
        if self.angle_scale is not None and self.angle_shift is not None:
            # A row with no tangent part has no direction to be shifted along.
            factor = self.angle_scale * factor + self.angle_shift * torch.rsqrt(square + _SMALLEST_SQUARE)
        return factor

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Take the step that the sub-layer asks for."""
        update = sublayer(stream)
        if self.normalize_update:
            wide = update.to(torch.promote_types(update.dtype, torch.float32))
            update = functional.rms_norm(wide, wide.shape[-1:], eps=1e-6).to(update.dtype)
        if self.max_update_angle is not None or self.angle_scale is not None:
            dtype = torch.promote_types(torch.promote_types(stream.dtype, update.dtype), torch.float32)
            v = tangent(stream.to(dtype), update.to(dtype))
            update = v * self.stretch(v.square().mean(-1, keepdim=True))
        update = self.branch(update)
        # The radius is named, not taken from the stream, so that rounding in bfloat16 cannot add up over the depth.
        return sphere_step(
            stream,
            update,
            self.alpha,
            retraction=self.retraction,
            max_angle=self.max_angle,
            radius=math.sqrt(stream.shape[-1]),
        )

    def extra_repr(self) -> str:
        """Step size, retraction and limits."""
        words = f"alpha={self.initial_alpha:.4g}, retraction={self.retraction!r}, max_angle={self.max_angle}"
        limit = self.max_update_angle
        return words if limit is None else f"{words}, max_update_angle={limit}"
