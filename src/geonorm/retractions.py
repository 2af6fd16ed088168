"""How far a step goes: the retractions ``phi(t) = p atan(t / p)`` and the two factors of a step, with their slopes.

All are smooth functions of ``q = (|w| / |x|)^2``, derivative included at 0, on tensors of any shape in float32 or
float64. The formulas are derived in ``docs/math.md``; names are those of :mod:`geonorm.geometry`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geonorm.errors import UserError, check_positive, unknown

RETRACTIONS = ("exponential", "projection", "cayley")
# Outside, p squared leaves float32 at common arguments, and phi is the exponential map's, or zero, to every digit.
SMALLEST_EXPONENT, LARGEST_EXPONENT = 1e-6, 1e6

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
