"""Checks the arguments of the step and picks the implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geonorm.errors import UserError, check_positive, unknown
from geonorm.geometry import check_rows, retraction_exponent
from geonorm.ops import cpp
from geonorm.ops.autograd import is_plain_on_cpu, sphere_step_autograd
from geonorm.ops.availability import why_not_triton
from geonorm.ops.reference import arithmetic_dtype, sphere_step_reference
from geonorm.ops.registered import sphere_step_cpp, sphere_step_triton
from geonorm.ops.transforms import needs_composition
from geonorm.torch_compat import constant_to_compilers

IMPLEMENTATIONS: dict[str, Any] = {
    "reference": sphere_step_reference,
    "autograd": sphere_step_autograd,
    "triton": sphere_step_triton,
    "cpp": sphere_step_cpp,
}


def which(x: Tensor, impl: str = "auto") -> str:
    """Name of the implementation that :func:`sphere_step` uses for two tensors like x.

    ``"auto"`` is ``"triton"`` for a tensor on a GPU where triton is installed, ``"cpp"`` on a CPU in eager mode where
    the C++ kernels were built when this process first asked (or see :func:`geonorm.ops.ensure_cpu_kernels`), and
    ``"autograd"`` everywhere else. :func:`why_not` says what keeps a kernel from being taken. Under ``torch.compile``
    on a CPU it is always ``"autograd"``: the compiler sees into the analytic function and fuses it with its neighbours.
    Inside a transform of ``torch.func``, and for tensors that carry a forward tangent, the plain composition stands in
    for all of them.

    Raises:
        UserError: unknown implementation, or one that cannot run here.
    """
    return _choose(x.device, arithmetic_dtype(x, x), impl)


def why_not(x: Tensor) -> str | None:
    """Why ``impl="auto"`` takes no fused kernel for tensors like x, in one line with the remedy; None if it does."""
    return _why_not(x.device, arithmetic_dtype(x, x))


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        reason = cpp.why_not_cpp()
        return None if reason is None else f"no C++ kernels: {reason}"
    reason = why_not_triton(device, dtype)
    return None if reason is None and device.type == "cuda" else f"no Triton kernels: {reason}"


# Compilers are not to trace into files and locks.
@constant_to_compilers
def _load_cpp() -> bool:
    cpp.load_or_build()
    return True


def _choose(device: torch.device, dtype: torch.dtype, impl: str) -> str:
    if impl == "auto":
        if device.type == "cuda" and why_not_triton(device, dtype) is None:
            return "triton"
        eager_cpu = device.type == "cpu" and not torch.compiler.is_compiling()
        return "cpp" if eager_cpu and cpp.why_not_cpp() is None else "autograd"
    if impl not in list(IMPLEMENTATIONS):
        raise unknown("implementation", impl, [*IMPLEMENTATIONS, "auto"])
    if impl == "triton" and (reason := why_not_triton(device, dtype)) is not None:
        raise UserError(f"impl='triton' cannot run here: {reason}")
    if impl == "cpp" and device.type != "cpu":
        raise UserError(f"impl='cpp' cannot run here: the tensor is on {device.type}, not a CPU; leave impl='auto'")
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
        x: points, ``[..., d]``, floating point. A zero row with a finite update stays zero and gets zero gradients.
        u: sub-layer outputs, the shape of x; may have another floating dtype (as under autocast).
        alpha: step size, a positive number, or a tensor with one element, which then gets a gradient. The value of a
            tensor is not checked, because reading it would stall a GPU.
        retraction: ``"exponential"`` (theta = t), ``"projection"`` (atan t), ``"cayley"`` (2 atan(t/2)) or a number p
            from 1e-6 to 1e6 (p atan(t/p), arXiv 2608.02668).
        max_angle: upper limit of theta, the angle travelled, in radians (above pi a step can come back), or None.
        radius: length of every row of the result; None keeps the length of x. Give it where many steps follow each
            other in a narrow dtype: rounding makes the length of a bfloat16 row wander, and this brings it back.
        impl: ``"auto"`` (see :func:`which`), ``"reference"`` (plain composition), ``"autograd"`` (analytic backward,
            saves x and u only), ``"triton"`` (fused kernels for a GPU) or ``"cpp"`` (C++ kernels for a CPU, built at
            the first call if they are not there). With each of them, derivatives of any order in either mode are
            right: inside a transform of ``torch.func`` and where an input carries a forward tangent the composition is
            taken, and a backward that is to be differentiated again (``create_graph=True``) is made of torch's
            functions.

    Returns:
        ``[..., d]`` in x's dtype. The arithmetic inside is float32, or float64 when an input is. ``alpha |u|/|x|``
        may be up to about 1e18; beyond that t squared leaves float32.

    Raises:
        UserError: shapes or devices differ, an input is not floating point, alpha, max_angle or radius is not positive,
            a name is unknown, or the implementation cannot run here.
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
    chosen = _choose(x.device, arithmetic_dtype(x, u), impl)
    if impl == "cpp":
        _load_cpp()
    if impl == "auto" and chosen == "autograd" and is_plain_on_cpu(x):
        cpp.ensure_begun()
    if needs_composition(x, u, alpha):
        chosen = "reference"
    return IMPLEMENTATIONS[chosen](x, u, alpha, retraction, max_angle, radius)
