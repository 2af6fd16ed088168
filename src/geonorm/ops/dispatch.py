"""Checks the arguments of the step and picks the implementation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geonorm.errors import UserError, check_positive, unknown
from geonorm.geometry import check_rows, retraction_exponent
from geonorm.ops.autograd import sphere_step_autograd
from geonorm.ops.reference import sphere_step_reference

IMPLEMENTATIONS: dict[str, Any] = {
    "reference": sphere_step_reference,
    "autograd": sphere_step_autograd,
}


def which(x: Tensor, impl: str = "auto") -> str:
    """Name of the implementation that :func:`sphere_step` uses for a tensor like x.

    Raises:
        UserError: unknown implementation.
    """
    if impl == "auto":
        return "autograd"
    if impl not in list(IMPLEMENTATIONS):
        raise unknown("implementation", impl, [*IMPLEMENTATIONS, "auto"])
    return impl


def sphere_step(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor = 1.0,
    *,
    retraction: str | float = "exponential",
    max_angle: float | None = None,
    radius: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Move each row of x along the sphere in the direction that u gives (GeoNorm, arXiv 2601.22095).

    With ``v`` the part of u tangent at x, ``w = alpha v`` and ``t = |w| / |x|``, the result is
    ``cos(theta) x + (sin(theta)/t) w`` with ``theta = phi(t)`` set by the retraction, so ``|y| = |x|`` in every row.

    Args:
        x: points, ``[..., d]``, floating point. A zero row stays zero and gets zero gradients.
        u: sub-layer outputs, the shape of x; may have another floating dtype (as under autocast).
        alpha: step size, a positive number, or a tensor with one element, which then gets a gradient. The value of a
            tensor is not checked, because reading it would stall a GPU.
        retraction: ``"exponential"`` (theta = t), ``"projection"`` (atan t), ``"cayley"`` (2 atan(t/2)) or a number p
            from 1e-6 to 1e6 (p atan(t/p), arXiv 2608.02668).
        max_angle: upper limit of theta, the angle travelled, in radians (above pi a step can come back), or None.
        radius: length of every row of the result; None keeps the length of x. Give it where many steps follow each
            other in a narrow dtype: rounding makes the length of a bfloat16 row wander, and this brings it back.
        impl: ``"auto"``, ``"reference"`` (plain composition, differentiable twice) or ``"autograd"`` (analytic
            backward, saves x and u only).

    Returns:
        ``[..., d]`` in x's dtype. The arithmetic inside is float32, or float64 when an input is. ``alpha |u|/|x|``
        may be up to about 1e18; beyond that t squared leaves float32.

    Raises:
        UserError: shapes differ, an input is not floating point, alpha, max_angle or radius is not positive, or a
            name is unknown.
    """
    check_rows(x, u)
    retraction_exponent(retraction)
    if max_angle is not None:
        max_angle = check_positive("max_angle", max_angle)
    if radius is not None:
        radius = check_positive("radius", radius)
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1 or not alpha.is_floating_point():
            raise UserError(
                f"`alpha` must be a number or a floating-point tensor with one element, got {alpha.dtype} of shape "
                f"{tuple(alpha.shape)}"
            )
    else:
        alpha = check_positive("alpha", alpha)
    return IMPLEMENTATIONS[which(x, impl)](x, u, alpha, retraction, max_angle, radius)
