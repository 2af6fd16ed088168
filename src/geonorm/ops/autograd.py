"""The step with its analytic backward: few passes over memory, and only x and u kept for the backward.

Derivation in ``docs/math.md``, section "The backward pass".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geonorm import geometry
from geonorm.ops.reference import arithmetic_dtype


class _Rows(NamedTuple):
    """What forward and backward both need: rows in the arithmetic dtype and one number a row.

    Attributes:
        scale: what the rows were divided by, a power of two a row; None for 1.
        wide: x and u in float64 and undivided, where sums over them are taken there; the numbers then are float64.
    """

    x: Tensor
    v: Tensor
    scale: Tensor | None
    ratio: Tensor
    inverse_square: Tensor
    v_square: Tensor
    empty: Tensor
    stored: bool = False
    wide: tuple[Tensor, Tensor] | None = None

    def number(self, value: Tensor) -> Tensor:
        """One number a row, ready for use on every entry."""
        return _stored(value.to(self.x.dtype)) if self.stored else value

    def products(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of a gradient's products with x and with v, ``[..., 1]``."""
        if self.wide is None:
            return (g * self.x).sum(-1, keepdim=True), (g * self.v).sum(-1, keepdim=True)
        # Not with v, which is known only after the other sums: that would be one more pass.
        assert self.scale is not None
        g_x, g_u = ((g.double() * value).sum(-1, keepdim=True) / self.scale for value in self.wide)
        return g_x, g_u - self.ratio * g_x


def _stored(value: Tensor) -> Tensor:
    """Put one number a row into memory; inductor would else repeat its formula at every entry of the row."""
    # Contiguous strides worked out here, since dynamo cannot ask a gradient for its own while it traces a backward.
    strides = [1]
    for size in reversed(value.shape[1:]):
        strides.insert(0, strides[0] * size)
    return value.contiguous().as_strided(value.shape, strides)


def is_plain_on_cpu(x: Tensor) -> bool:
    """Whether numbers may be read back: that stalls a GPU, breaks a compiled graph, fails on a tensor without data."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def _rows(x: Tensor, u: Tensor) -> _Rows:
    dtype, stored = arithmetic_dtype(x, u), x.device.type == "cpu" and torch.compiler.is_compiling()
    if stored and x.dtype == u.dtype == torch.float32:
        return _one_pass_rows(x, u)
    x, u = x.to(dtype), u.to(dtype)
    if is_plain_on_cpu(x):
        # Up to half of the time of the eager step is saved where no row has to be scaled.
        rows = _reduce(x, u, None)
        if _in_range(rows, dtype):
            return rows
    # The scale is a power of two, kept where its inverse is no subnormal number: the product is the quotient to the
    # last bit, and dividing every entry took half of the time of the compiled step.
    scale = geometry.row_scale(x).clamp_max(1 / torch.finfo(dtype).tiny)
    inverse = 1 / scale
    return _reduce(x * inverse, u * inverse, scale)._replace(stored=stored)


def _one_pass_rows(x: Tensor, u: Tensor) -> _Rows:
    """For float32 and a compiler on a CPU, which turns each reduction that needs another's result into a pass.

    Products of float32 numbers are exact and in range in float64. So rows need not be scaled before their sums, and the
    square of v may come from three sums of one pass; what cancels there is lost below float32. Sums in float32 would
    lose digits of alpha's gradient where u lies nearly along x. Entries stay float32, of which a vector holds twice as
    many. Narrower inputs do not come here, because inductor does not vectorise their conversion to float64.
    """
    wide = x.double(), u.double()
    square, dot, u_square = ((wide[i] * wide[j]).sum(-1, keepdim=True) for i, j in ((0, 0), (0, 1), (1, 1)))
    empty = square == 0
    square = torch.where(empty, 1.0, square)
    # Powers of two for rows so short or long that their inverse square leaves float32 in a number a row.
    scale = torch.where(square < 2.0**-160, 2.0**-100, torch.where(square > 2.0**120, 2.0**60, 1.0)).to(square.dtype)
    ratio = dot / square
    v_square = torch.where(empty, 0.0, (u_square - dot * ratio).clamp_min(0.0)) / scale.square()
    inverse_square = torch.where(empty, 0.0, scale.square() / square)
    inverse = _stored((1 / scale).to(x.dtype))
    x_scaled = x * inverse
    rows = _Rows(x_scaled, x_scaled, scale, ratio, inverse_square, v_square, empty, stored=True, wide=wide)
    v = torch.addcmul(u * inverse, rows.number(ratio), x_scaled, value=-1)
    # Where u's part along x is long, y has the length of x only by the numbers of v as it was rounded.
    rest = _left_along(x_scaled, v, ratio, inverse_square)
    rounded = ((v * v).sum(-1, keepdim=True) - rest * rest / torch.where(empty, 1.0, inverse_square)).clamp_min(0.0)
    v_square = torch.where(geometry.is_long(ratio), rounded, v_square)
    return rows._replace(v=torch.addcmul(v, rows.number(rest), x_scaled, value=-1), v_square=v_square)


def _left_along(x: Tensor, v: Tensor, ratio: Tensor, inverse_square: Tensor) -> Tensor:
    """What rounding has left of x in v where u had a long part along x, in units of x, ``[..., 1]``; elsewhere 0."""
    return torch.where(geometry.is_long(ratio), (v * x).sum(-1, keepdim=True) * inverse_square, 0.0)


def _reduce(x: Tensor, u: Tensor, scale: Tensor | None) -> _Rows:
    square = (x * x).sum(-1, keepdim=True)
    empty = square == 0
    inverse_square = torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, square))
    ratio = (x * u).sum(-1, keepdim=True) * inverse_square
    v = torch.addcmul(u, ratio, x, value=-1)
    v_square = None
    if not is_plain_on_cpu(x) or bool(geometry.is_long(ratio).any()):
        rest = _left_along(x, v, ratio, inverse_square)
        if torch.compiler.is_compiling():
            # Both sums in one walk over the row. Outside, where a graph may be made of this, v comes first: |v|^2 must
            # not be cut off at zero, which would end its second derivative there.
            v_square = ((v * v).sum(-1, keepdim=True) - rest * rest * square).clamp_min(0.0)
        v, ratio = torch.addcmul(v, rest, x, value=-1), ratio + rest
    if v_square is None:
        v_square = (v * v).sum(-1, keepdim=True)
    # An empty row takes no step, however large its update: infinity times its zero would be NaN further on.
    return _Rows(x, v, scale, ratio, inverse_square, torch.where(empty, 0.0, v_square), empty)


def _in_range(rows: _Rows, dtype: torch.dtype) -> bool:
    """True if no square over- or underflowed."""
    if rows.ratio.numel() == 0:
        return True
    largest = (rows.ratio.abs() + rows.inverse_square + rows.v_square).max()
    limit = torch.finfo(dtype).max ** 0.75
    return bool((largest < limit) & (rows.inverse_square.min() > 1 / limit))


def step_forward(
    x: Tensor,
    u: Tensor,
    alpha: Tensor | float,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None,
) -> Tensor:
    """Value of the step, ``[..., d]`` in x's dtype, without a graph."""
    rows = _rows(x, u)
    alpha = _as_scalar(alpha, rows.x.dtype)
    q = alpha * alpha * rows.v_square * rows.inverse_square
    cos, sin_ratio = geometry.step_factors(q, retraction, max_angle)
    cos = torch.where(rows.empty, 0.0, cos)
    gain = torch.where(rows.empty, 0.0, alpha * sin_ratio)
    if radius is not None:
        resize = radius * rows.inverse_square.sqrt()
        cos, gain = resize * cos, resize * gain
    y = torch.addcmul(rows.x * rows.number(cos), rows.number(gain), rows.v)
    if rows.scale is not None and radius is None:
        y = y * rows.number(rows.scale)
    return y.to(x.dtype)


def step_backward(
    g: Tensor,
    x: Tensor,
    u: Tensor,
    alpha: Tensor | float,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``<g, y>`` by x, u and alpha in their dtypes and shapes; None where ``needs`` is false.

    A composition of torch's functions: with a graph switched on, what it returns can be differentiated again.
    """
    rows = _rows(x, u)
    g = g.to(rows.x.dtype)
    alpha_now = _as_scalar(alpha, rows.x.dtype)
    q = alpha_now * alpha_now * rows.v_square * rows.inverse_square
    cos, sin_ratio = geometry.step_factors(q, retraction, max_angle)
    cos_slope, sin_slope = geometry.step_factor_slopes(q, cos, sin_ratio, retraction, max_angle)
    cos = torch.where(rows.empty, 0.0, cos)
    sin_ratio = torch.where(rows.empty, 0.0, sin_ratio)
    g_x, g_v = rows.products(g)
    resize = 1.0
    if radius is not None:
        resize = radius * rows.inverse_square.sqrt()
        resize = resize if rows.scale is None else resize / rows.scale
        g_x, g_v = resize * g_x, resize * g_v
    slope = torch.where(rows.empty, 0.0, cos_slope * g_x + alpha_now * sin_slope * g_v)
    gain = alpha_now * sin_ratio
    along = rows.number(gain * g_x * rows.inverse_square)
    across = rows.number(2 * alpha_now * alpha_now * slope * rows.inverse_square)

    grad_x = grad_u = grad_alpha = None
    if needs[0] or needs[1]:
        grad_u = torch.addcmul(torch.addcmul(g * rows.number(gain * resize), across, rows.v), along, rows.x, value=-1)
    if needs[0]:
        assert grad_u is not None
        grad_x = torch.addcmul(g * rows.number(cos * resize), rows.number(rows.ratio), grad_u, value=-1)
        grad_x = torch.addcmul(grad_x, along, rows.v, value=-1)
        outward = 2 * slope * q
        if radius is not None:
            outward = outward + cos * g_x + gain * g_v
        grad_x = torch.addcmul(grad_x, rows.number(outward * rows.inverse_square), rows.x, value=-1)
        grad_x = grad_x.to(x.dtype)
    if isinstance(alpha, Tensor) and needs[2]:
        per_row = sin_ratio * g_v + 2 * alpha_now * slope * rows.v_square * rows.inverse_square
        if rows.scale is not None:
            per_row = per_row * rows.scale
        grad_alpha = per_row.sum().to(alpha).reshape(alpha.shape)
    grad_u = grad_u.to(u.dtype) if grad_u is not None and needs[1] else None
    return grad_x, grad_u, grad_alpha


class _SphereStep(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        u: Tensor,
        alpha: Tensor | float,
        retraction: str | float,
        max_angle: float | None,
        radius: float | None,
    ) -> Tensor:
        return step_forward(x, u, alpha, retraction, max_angle, radius)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, u, alpha, ctx.retraction, ctx.max_angle, ctx.radius = inputs
        ctx.alpha = None if isinstance(alpha, Tensor) else alpha
        ctx.save_for_backward(x, u, *([alpha] if isinstance(alpha, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, u, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.alpha
        options = (ctx.retraction, ctx.max_angle, ctx.radius)
        return (*step_backward(grads[0], x, u, alpha, *options, ctx.needs_input_grad[:3]), None, None, None)


def _as_scalar(alpha: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    return alpha.to(dtype).reshape(()) if isinstance(alpha, Tensor) else alpha


def sphere_step_autograd(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None = None,
) -> Tensor:
    """The step with an analytic backward that saves x and u only; same arguments as the reference.

    Differentiable to any order in reverse mode, since the backward is made of torch's functions.
    """
    return _SphereStep.apply(x, u, alpha, retraction, max_angle, radius)
