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

from geonorm.errors import UserError, check_positive, unknown

RETRACTIONS = ("exponential", "projection", "cayley")
# Outside, p squared leaves float32 at common arguments, and phi is the exponential map's, or zero, to every digit.
SMALLEST_EXPONENT, LARGEST_EXPONENT = 1e-6, 1e6
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Below these arguments the closed forms lose digits to cancellation, in the value or in the derivative that autograd
# takes of it; the series are exact to float64 there.
_TRIG_SERIES_BELOW = 0.25
_ATAN_SERIES_BELOW = 0.02
_COS_SERIES = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(10))
_SINC_SERIES = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(10))
_ATAN_SERIES = tuple((-1.0) ** n / (2 * n + 1) for n in range(11))
_SINC_SLOPE_SERIES = tuple(n * c for n, c in enumerate(_SINC_SERIES))[1:]
_ATAN_SLOPE_SERIES = tuple(n * c for n, c in enumerate(_ATAN_SERIES))[1:]


def retraction_exponent(retraction: str | float) -> float:
    """Return the exponent p of ``phi(t) = p atan(t / p)``; infinity stands for the exponential map.

    Args:
        retraction: ``"exponential"``, ``"projection"`` (p = 1), ``"cayley"`` (p = 2) or a number p from 1e-6 to 1e6
            (arXiv 2608.02668); infinity is the exponential map too.

    Raises:
        UserError: the name is unknown, or the number is out of range.
    """
    if isinstance(retraction, str):
        if retraction not in RETRACTIONS:
            raise unknown("retraction", retraction, [*RETRACTIONS, "a positive number p"])
        return {"exponential": math.inf, "projection": 1.0, "cayley": 2.0}[retraction]
    if retraction == math.inf:
        return math.inf
    p = check_positive("retraction", retraction)
    if not SMALLEST_EXPONENT <= p <= LARGEST_EXPONENT:
        raise UserError(
            f"`retraction` p must lie in {SMALLEST_EXPONENT:g}..{LARGEST_EXPONENT:g}, got {p:g}; 'exponential' is the "
            "limit of large p"
        )
    return p


def _series(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * z + coefficient
    return total


def cos_of_square(q: Tensor) -> Tensor:
    """``cos(sqrt(q))`` for ``q >= 0`` as a smooth function of q, derivative included at 0. Any shape."""
    small = q < _TRIG_SERIES_BELOW
    far = torch.where(small, 1.0, q)
    return torch.where(small, _series(_COS_SERIES, torch.where(small, q, 0.0)), far.sqrt().cos())


def sinc_of_square(q: Tensor) -> Tensor:
    """``sin(sqrt(q)) / sqrt(q)`` for ``q >= 0`` as a smooth function of q, derivative included at 0. Any shape."""
    small = q < _TRIG_SERIES_BELOW
    root = torch.where(small, 1.0, q).sqrt()
    return torch.where(small, _series(_SINC_SERIES, torch.where(small, q, 0.0)), root.sin() / root)


def _atan_ratio_of_square(r: Tensor) -> Tensor:
    """``atan(sqrt(r)) / sqrt(r)`` for ``r >= 0`` as a smooth function of r."""
    small = r < _ATAN_SERIES_BELOW
    root = torch.where(small, 1.0, r).sqrt()
    return torch.where(small, _series(_ATAN_SERIES, torch.where(small, r, 0.0)), root.atan() / root)


def step_factors(q: Tensor, retraction: str | float, max_angle: float | None = None) -> tuple[Tensor, Tensor]:
    """Factors C and S of the step ``y = C x + S w`` as smooth functions of ``q = (|w| / |x|)^2``.

    ``C = cos(theta)`` and ``S = sin(theta) / t`` with ``theta = phi(t)``, ``t = sqrt(q)``. Both are smooth at q = 0,
    where S is 1 and not 0/0; that is what lets a row with no tangent part still pass a gradient to its sub-layer.

    Args:
        q: float32 or float64, any shape, not negative.
        retraction: see :func:`retraction_exponent`.
        max_angle: upper limit of theta in radians, or None.

    Raises:
        UserError: unknown retraction, or a limit that is not positive.
    """
    p = retraction_exponent(retraction)
    if p == 1.0:
        cos, sin_ratio = _unit_over_root(q)
    elif p == 2.0:
        sin_ratio = 1 / (1 + q / 4)
        cos = 2 * sin_ratio - 1
    elif p == math.inf:
        cos, sin_ratio = cos_of_square(q), sinc_of_square(q)
    else:
        ratio = _atan_ratio_of_square(q / p**2)
        theta_square = q * ratio**2
        cos, sin_ratio = cos_of_square(theta_square), ratio * sinc_of_square(theta_square)
    if max_angle is None:
        return cos, sin_ratio
    limit = angle_limit(p, check_positive("max_angle", max_angle))
    if limit >= _largest_t(q.dtype):
        return cos, sin_ratio
    clamped = q > limit**2
    root = torch.where(clamped, q, 1.0).sqrt()
    return (
        torch.where(clamped, math.cos(max_angle), cos),
        torch.where(clamped, math.sin(max_angle) / root, sin_ratio),
    )


def _unit_over_root(q: Tensor) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(1 + q)
    return factor, factor


def step_factor_slopes(
    q: Tensor, cos: Tensor, sin_ratio: Tensor, retraction: str | float, max_angle: float | None = None
) -> tuple[Tensor, Tensor]:
    """Derivatives of C and S by q, given what :func:`step_factors` returned for the same arguments.

    Same shapes and dtype as q. Written so that nothing cancels as q goes to 0.
    """
    p = retraction_exponent(retraction)
    if p == 1.0:
        cos_slope = sin_slope = -0.5 * cos**3
    elif p == 2.0:
        sin_slope = -0.25 * sin_ratio.square()
        cos_slope = 2 * sin_slope
    elif p == math.inf:
        cos_slope, sin_slope = -0.5 * sin_ratio, _sinc_slope(q)
    else:
        r = q / p**2
        speed = 1 / (1 + r)
        ratio = _atan_ratio_of_square(r)
        theta_square = q * ratio**2
        small = r < _ATAN_SERIES_BELOW
        far = torch.where(small, 1.0, r)
        ratio_slope = torch.where(
            small,
            _series(_ATAN_SLOPE_SERIES, torch.where(small, r, 0.0)),
            (1 / (1 + far) - ratio) / (2 * far),
        )
        cos_slope = -0.5 * sin_ratio * speed
        sin_slope = ratio_slope / p**2 * sinc_of_square(theta_square) + ratio**2 * speed * _sinc_slope(theta_square)
    if max_angle is None or (limit := angle_limit(p, max_angle)) >= _largest_t(q.dtype):
        return cos_slope, sin_slope
    clamped = q > limit**2
    return (
        torch.where(clamped, 0.0, cos_slope),
        torch.where(clamped, -0.5 * sin_ratio / torch.where(clamped, q, 1.0), sin_slope),
    )


def _sinc_slope(q: Tensor) -> Tensor:
    small = q < _TRIG_SERIES_BELOW
    far = torch.where(small, 1.0, q)
    root = far.sqrt()
    return torch.where(
        small,
        _series(_SINC_SLOPE_SERIES, torch.where(small, q, 0.0)),
        (root.cos() - root.sin() / root) / (2 * far),
    )


def angle_limit(p: float, max_angle: float) -> float:
    """Return the t at which ``p atan(t / p)`` reaches ``max_angle`` (radians); infinity if it never does."""
    if p == math.inf:
        return max_angle
    return p * math.tan(max_angle / p) if max_angle / p < math.pi / 2 else math.inf


def _largest_t(dtype: torch.dtype) -> float:
    """The t above which its square is no number any more: a clamp from there on never acts."""
    return math.sqrt(torch.finfo(dtype).max)


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
