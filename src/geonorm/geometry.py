"""The sphere that a residual stream walks on: tangent parts, great circles, angles, retractions.

Every function works per row, over the last axis, on tensors of any shape ``[..., d]``, takes its radius from the
point itself, and is differentiable everywhere it says so. Nothing here changes dtype: give float32 or float64. The
formulas are derived in ``docs/math.md``.

Names: ``x`` point, ``u`` sub-layer output, ``v`` tangent part, ``w`` step, ``t = |w| / |x|``, ``theta`` angle moved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geonorm.errors import UserError
from geonorm.retractions import (
    LARGEST_EXPONENT,
    RETRACTIONS,
    SMALLEST_EXPONENT,
    angle_limit,
    cos_of_square,
    retraction_exponent,
    sinc_of_square,
    step_factor_slopes,
    step_factors,
)

__all__ = [
    "FLOAT_DTYPES",
    "LARGEST_EXPONENT",
    "RETRACTIONS",
    "SMALLEST_EXPONENT",
    "angle",
    "angle_limit",
    "check_rows",
    "cos_of_square",
    "distance",
    "exp",
    "is_long",
    "log",
    "norm",
    "retract",
    "retraction_exponent",
    "rotate",
    "row_scale",
    "sinc_of_square",
    "step_factor_slopes",
    "step_factors",
    "tangent",
]
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def norm(x: Tensor) -> Tensor:
    """Length of each row, ``[..., d] -> [..., 1]``, without overflow or underflow of the squares.

    Differentiable where a row is not zero; the gradient at a zero row is zero.
    """
    scale = row_scale(x)
    square = (x / scale).square().sum(-1, keepdim=True)
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt()) * scale


def row_scale(x: Tensor) -> Tensor:
    """Power of two near the largest magnitude of each row, ``[..., d] -> [..., 1]``; 1 for a zero row.

    Dividing by it is exact, so a row gives the same bits whether it was scaled or not. Carries no gradient.

    Raises:
        UserError: x is neither float32 nor float64.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise UserError(f"geometry works in float32 or float64, got {x.dtype}; convert with .float()")
    if x.shape[-1] == 0:
        return x.new_ones(*x.shape[:-1], 1)
    largest = x.detach().abs().amax(-1, keepdim=True)
    bits, exponent_mask = (torch.int64, 0x7FF << 52) if x.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    power = (largest.view(bits) & exponent_mask).view(x.dtype).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.where((largest > 0) & largest.isfinite(), power, 1.0)


def tangent(x: Tensor, u: Tensor) -> Tensor:
    """Part of u that is tangent to the sphere at x: ``v = u - (<u,x>/<x,x>) x``. Shapes ``[..., d]``, equal.

    Projected once more where :func:`is_long` says so. At a zero row there is no direction to remove and u comes back
    unchanged.
    """
    scale, size = row_scale(x), row_scale(u)
    unit = x / scale
    square = unit.square().sum(-1, keepdim=True)
    unit_square = torch.where(square == 0, 1.0, square)
    # u is brought near 1 as well: its products with x must neither overflow nor fall among the subnormal numbers.
    part = u / size
    along = (part * unit).sum(-1, keepdim=True) / unit_square
    part = part - along * unit
    rest = (part * unit).sum(-1, keepdim=True) / unit_square
    return (part - torch.where(is_long(along * (size / scale)), rest, 0.0) * unit) * size


def is_long(ratio: Tensor) -> Tensor:
    """Whether a part of u along x, in units of x, is so long that its rounding shows in the length of a step."""
    return ratio.abs() > 4.0  # Not by a name, which dynamo takes for an input that may change.


def retract(
    x: Tensor,
    w: Tensor,
    retraction: str | float = "exponential",
    *,
    max_angle: float | None = None,
    radius: float | None = None,
) -> Tensor:
    """Move from x by the tangent step w and land on the sphere of x: ``y = cos(theta) x + (sin(theta)/t) w``.

    Args:
        x: points, ``[..., d]``.
        w: steps, the same shape, tangent at x (see :func:`tangent`); ``t = |w| / |x|`` is in radians.
        retraction: see :func:`retraction_exponent`.
        max_angle: upper limit of theta, the angle travelled, in radians (above pi a step can come back), or None.
        radius: length of the result; None keeps the length of x.

    Returns:
        Points of the same shape with ``|y| = |x|``, or ``radius``. Where x is zero, y is zero and so are its gradients.

    Raises:
        UserError: unknown retraction, or a limit that is not positive.
    """
    scale = row_scale(x)
    square = (x / scale).square().sum(-1, keepdim=True)
    empty = square == 0
    q = (w / scale).square().sum(-1, keepdim=True) / torch.where(empty, 1.0, square)
    # A zero row must not send an infinity backwards, so its q is a constant before the factors see it.
    cos, sin_ratio = step_factors(torch.where(empty, 0.0, q), retraction, max_angle)
    if radius is not None:
        x, w = x / scale, w / scale
        resize = radius / torch.where(empty, 1.0, square).sqrt()
        cos, sin_ratio = resize * cos, resize * sin_ratio
    return torch.where(empty, 0.0, cos * x + sin_ratio * w)


def exp(x: Tensor, v: Tensor) -> Tensor:
    """Exponential map: follow the great circle from x along the tangent v for the arc length ``|v|``."""
    return retract(x, v, "exponential")


def rotate(x: Tensor, v: Tensor, theta: Tensor, radius: float) -> Tensor:
    """Turn x by the angle theta along the great circle towards v, and land at length ``radius``.

    ``radius (cos(theta) x/|x| + sin(theta) v/|v|)``: unlike :func:`retract`, the angle is given and the length of v
    does not matter, so that a step can be carried out whose angle was computed by another rule.

    Args:
        x: points, ``[..., d]``; a zero row has no direction and contributes none.
        v: tangents at x (see :func:`tangent`), the same shape; a zero row contributes none, so that theta = pi turns x
            into its opposite.
        theta: angles in radians, ``[..., 1]``.
        radius: length of the result where x and v are not zero.
    """
    length_x, length_v = norm(x), norm(v)
    unit_x = x / torch.where(length_x == 0, 1.0, length_x)
    unit_v = v / torch.where(length_v == 0, 1.0, length_v)
    return radius * (theta.cos() * unit_x + theta.sin() * unit_v)


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle between rows in radians, in [0, pi], ``[..., d] -> [...]``.

    Uses ``2 atan2(|a - b|, |a + b|)`` on unit rows, which keeps every digit of small angles and of angles near pi; the
    arc cosine of a dot product returns 0 below 3e-4 rad in float32. A zero row makes the angle 0.
    """
    length_x, length_y = norm(x), norm(y)
    zero = (length_x == 0) | (length_y == 0)
    a = x / torch.where(zero, 1.0, length_x)
    b = y / torch.where(zero, 1.0, length_y)
    theta = 2 * torch.atan2(norm(a - b), norm(a + b))
    return torch.where(zero, 0.0, theta).squeeze(-1)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Great-circle distance from x to y along the sphere of x, ``|x|`` times the angle, ``[..., d] -> [...]``.

    y is read as a direction: its own length does not matter.
    """
    return norm(x).squeeze(-1) * angle(x, y)


def log(x: Tensor, y: Tensor) -> Tensor:
    """Logarithm map: the tangent v at x with ``exp(x, v)`` in the direction of y and ``|v| = distance(x, y)``.

    Shapes ``[..., d]``, equal. y is read as a direction. Opposite points have no single great circle between them: the
    one through the coordinate axis on which x is smallest is taken, so the result is finite and has length
    ``pi |x|``. In one dimension, where no tangent exists, and at zero rows, the result is zero.
    """
    if x.shape[-1] < 2:
        return torch.zeros_like(x)
    theta = angle(x, y).unsqueeze(-1)
    v = tangent(x, y / row_scale(y))
    length = norm(v)
    # Forming v leaves a rounding error of a few eps; below that its direction is noise.
    lost = length <= 8 * torch.finfo(x.dtype).eps * norm(y / row_scale(y))
    opposite = lost & (theta > math.pi / 2)
    axis = torch.zeros_like(x).scatter(-1, x.detach().abs().argmin(-1, keepdim=True), 1.0)
    v = torch.where(opposite, tangent(x, axis), torch.where(lost, 0.0, v))
    length = norm(v)
    unit = v / torch.where(length == 0, 1.0, length)
    return theta * norm(x) * unit


def check_rows(x: Tensor, u: Tensor) -> None:
    """Check that x and u are floating-point tensors (16, 32 or 64 bits) of one shape, on one device, with an axis.

    Raises:
        UserError: names the tensor that is wrong and what was expected.
    """
    for name, value in (("x", x), ("u", u)):
        if not isinstance(value, Tensor):
            raise UserError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")
        if value.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"`{name}` must be floating point (16, 32 or 64 bits), got {value.dtype}; convert it with .float()"
            )
    if x.dim() == 0:
        raise UserError("`x` must have at least one axis: the step works over the last one")
    if x.shape != u.shape:
        raise UserError(f"`x` and `u` must have the same shape, got {tuple(x.shape)} and {tuple(u.shape)}")
    if x.device != u.device:
        raise UserError(f"`x` and `u` must be on the same device, got {x.device} and {u.device}")
