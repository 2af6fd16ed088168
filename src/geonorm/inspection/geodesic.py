"""Any model as a walk on the sphere: a direction, and the radius carried beside it.

The stream ``x = rho n`` is held as its direction n, a row of RMS 1, and its RMS rho. No sum ``x + u`` is formed: a
sub-layer's output u turns n along a great circle and changes rho. ``docs/unification.md`` derives it for every
placement.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.errors import UserError
from geonorm.models import base_model, blocks
from geonorm.models.adapter import adapter_for
from geonorm.models.blocks import connection_name
from geonorm.models.rewiring import as_rewired
from geonorm.placements import Connection, Placement, unit_rms
from geonorm.placements.base import SUBLAYERS, Norms, Sublayer
from geonorm.placements.geonorm import SphereConnection
from geonorm.placements.keel import KeelConnection
from geonorm.placements.lns import ScaledInputConnection
from geonorm.placements.output import OutputConnection
from geonorm.placements.parallel import ParallelAttention, ParallelMLP
from geonorm.placements.post import ScaledPostConnection
from geonorm.placements.pre import PreConnection
from geonorm.placements.sandwich import SandwichConnection
from geonorm.placements.scaled_sandwich import ScaledSandwichConnection

# Connections whose plane step is "turn by atan2(across, weight |x| + along)"; what differs is which norms they have.
ADDITIVE = (
    PreConnection,
    SandwichConnection,
    OutputConnection,
    ParallelAttention,
    ParallelMLP,
    ScaledPostConnection,
    KeelConnection,
    ScaledInputConnection,
    ScaledSandwichConnection,
)


@dataclasses.dataclass(frozen=True)
class Polar:
    """A stream ``rho n``.

    Attributes:
        direction: n, ``[..., d]``, RMS 1; a zero row where the stream is zero.
        radius: rho, ``[..., 1]``, the RMS of the stream.
        read: the stream that the next sub-layer reads where that is not this one: the MLP of a parallel layer reads
            what the attention read.
    """

    direction: Tensor
    radius: Tensor
    read: Polar | None = None

    @staticmethod
    def of(x: Tensor) -> Polar:
        """Split rows ``[..., d]`` into direction and radius."""
        return Polar(unit_rms(x), geometry.norm(x) / math.sqrt(x.shape[-1]))

    def point(self) -> Tensor:
        """Put the two together again: ``[..., d]``."""
        return self.radius * self.direction


def geodesic_form(model: nn.Module) -> nn.Module:
    """Return a model that computes the same function with every step taken on the sphere.

    The result shares the weights of ``model``, which stays as it is, and can be called, cached and generated from like
    it. Of the blocks' arithmetic on the stream nothing is kept: norms are read off the direction, with their eps
    divided by the squared radius; steps are turns along great circles; the last norm reads direction and radius. It
    is for measuring and for checking the theory, in evaluation mode; it is slower, not meant for training, and not to
    be saved.

    Args:
        model: a stock or rewired decoder of a supported family, weights in float32 or float64.

    Returns:
        A model in evaluation mode with equal logits up to rounding: about 1e-5 of their size in float32. In float64 the
        norms here are computed in float64; the RMSNorms of transformers round to float32 inside, and the two forms
        then agree to about 1e-7.

    Raises:
        UserError: unsupported model, placement or norm, or weights in another dtype.
    """
    view = as_rewired(model)
    dtype = next(view.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise UserError(f"the geodesic form works in float32 or float64, the model is in {dtype}; call .float() first")
    adapter, layers = adapter_for(view), cast(Any, blocks(view))
    placement = _Geodesic(layers[0].placement)
    for block in layers:
        block.placement = placement
        for sublayer in SUBLAYERS:
            name = connection_name(sublayer)
            block.add_module(name, _geodesic(block.get_submodule(name), adapter.unit_gain))
    if placement.final_norm:
        inner, name = base_model(view), adapter.final_norm
        setattr(inner, name, _FinalNorm(getattr(inner, name), adapter.unit_gain))
    # Its parts have other names than a checkpoint of its class, which would load with some of them drawn anew.
    view.save_pretrained = _refuse_saving  # type: ignore[assignment]
    return view


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise UserError("a geodesic form cannot be saved; save the model that it was made from, whose weights it shares")


class _Geodesic(Placement):
    """A placement whose stream is polar; the rest is that of the placement it stands for."""

    def __init__(self, base: Placement) -> None:
        object.__setattr__(self, "base", base)

    @property
    def norms(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.norms  # type: ignore[attr-defined]

    @property
    def final_norm(self) -> bool:  # type: ignore[override]
        return self.base.final_norm  # type: ignore[attr-defined]

    def enter(self, h: Tensor) -> Polar:
        return Polar.of(self.base.enter(h))  # type: ignore[attr-defined]

    def exit(self, stream: Polar) -> Any:
        return stream if self.final_norm else stream.point()

    def point(self, stream: Polar) -> Tensor:
        return stream.point()


class GeodesicConnection(Connection):
    """One step of a walk in polar form.

    Attributes:
        angle: turned by the latest forward pass, radians, ``[...]``; None before it.
    """

    def __init__(self, base: Connection, unit_gain: float) -> None:
        super().__init__()
        self.base = base
        self.unit_gain = unit_gain
        self.angle: Tensor | None = None

    def forward(self, stream: Polar, sublayer: Sublayer, norms: Norms) -> Polar:
        """Turn the direction and change the radius as the sub-layer asks for."""
        read = stream.read or stream
        reads = norm_of_direction(norms["input"], read, self.unit_gain) if "input" in norms else read.point()
        if isinstance(self.base, ScaledInputConnection):
            reads = reads * self.base.scale
        update = sublayer(reads)
        if "output" in norms:
            update = norms["output"](update)
        update = self.base.branch(update)
        if isinstance(self.base, ScaledSandwichConnection):
            update = update / math.sqrt(self.base.k)
        theta, radius = self._turn(stream, update)
        self.angle = theta.detach().squeeze(-1)
        direction = geometry.rotate(
            stream.direction,
            geometry.tangent(stream.direction, update),
            theta,
            math.sqrt(update.shape[-1]),
        )
        moved = Polar(direction, radius, stream if isinstance(self.base, ParallelAttention) else None)
        # A norm on the stream reads the landing point; its gain turns the row once more and sets the next radius.
        return Polar.of(norm_of_direction(norms["stream"], moved, self.unit_gain)) if "stream" in norms else moved

    def _turn(self, stream: Polar, update: Tensor) -> tuple[Tensor, Tensor]:
        """The angle and the new radius, both ``[..., 1]``."""
        n, width = stream.direction, update.shape[-1]
        across = geometry.norm(geometry.tangent(n, update)) / math.sqrt(width)
        if isinstance(self.base, SphereConnection):
            return _sphere_angle(self.base, update, across), stream.radius
        # <u, n>/d, because n has length sqrt(d).
        ahead = self._weight * stream.radius + (update * n).sum(-1, keepdim=True) / width
        return torch.atan2(across, ahead), torch.hypot(across, ahead)

    @property
    def _weight(self) -> float:
        if isinstance(self.base, ScaledSandwichConnection):
            return math.sqrt((self.base.k - 1) / self.base.k)
        if isinstance(self.base, KeelConnection):
            return self.base.scale
        return self.base.alpha if isinstance(self.base, ScaledPostConnection) else 1.0


def _geodesic(connection: nn.Module, unit_gain: float) -> GeodesicConnection:
    if isinstance(connection, SphereConnection) and not isinstance(connection.branch, nn.Identity):
        raise UserError("the geodesic form of a step on the sphere with a gain or a warm-up is not known")
    if isinstance(connection, (*ADDITIVE, SphereConnection)):
        return GeodesicConnection(connection, unit_gain)
    raise UserError(f"the geodesic form of a {type(connection).__name__} is not known; see docs/unification.md")


def _sphere_angle(connection: SphereConnection, update: Tensor, across: Tensor) -> Tensor:
    if connection.normalize_update:
        # Scaling u scales its part across by the same factor.
        across = across * torch.rsqrt(update.square().mean(-1, keepdim=True) + 1e-6)
    t = connection.alpha * across * connection.stretch(across.square())
    p = geometry.retraction_exponent(connection.retraction)
    theta = t if p == math.inf else p * torch.atan(t / p)
    return theta if connection.max_angle is None else theta.clamp(-connection.max_angle, connection.max_angle)


class _FinalNorm(nn.Module):
    """The model's own last norm, reading a polar stream."""

    def __init__(self, norm: nn.Module, unit_gain: float) -> None:
        super().__init__()
        self.norm = norm
        self.unit_gain = unit_gain

    def forward(self, stream: Polar) -> Tensor:
        return norm_of_direction(self.norm, stream, self.unit_gain)


def norm_of_direction(norm: Any, stream: Polar, unit_gain: float = 1.0) -> Tensor:
    """What a norm returns for ``rho n``, computed from n and rho: its eps becomes ``eps / rho^2``.

    ``RMSNorm(rho n) = g n / sqrt(mean(n^2) + eps/rho^2)`` and, since the mean and the variance scale along,
    ``LayerNorm(rho n) = g (n - mean n) / sqrt(var n + eps/rho^2) + b``. A zero stream gives 0, or b.

    Args:
        norm: an RMSNorm of torch or transformers, or a LayerNorm.
        stream: rho and n.
        unit_gain: weight at which the gain g is 1; 0 where a family stores the difference from 1.

    Raises:
        UserError: a norm of neither kind.
    """
    n = stream.direction
    if isinstance(norm, nn.LayerNorm):
        n = n - n.mean(-1, keepdim=True)
    unit = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + _eps(norm, n.dtype) / stream.radius.square())
    if isinstance(norm, nn.LayerNorm):
        unit = unit if norm.weight is None else unit * norm.weight
        return unit if norm.bias is None else unit + norm.bias
    return unit if norm.weight is None else unit * (norm.weight + (1 - unit_gain))


def _eps(norm: Any, dtype: torch.dtype) -> float:
    if isinstance(norm, nn.LayerNorm):
        return norm.eps
    if "RMSNorm" not in type(norm).__name__:
        raise UserError(f"the geodesic form knows RMSNorm and LayerNorm, not {type(norm).__name__}")
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return torch.finfo(dtype).eps if eps is None else eps
