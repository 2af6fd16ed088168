"""Add and RMSNorm in one operation: what other placements do between sub-layers, fused as the step is on a GPU.

For benchmarks of the kernels alone. No model of geonorm takes these: there the other placements run PyTorch's own
functions, which only ``torch.compile`` fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from geonorm.errors import UserError, check_positive, unknown
from geonorm.geometry import FLOAT_DTYPES, check_rows
from geonorm.ops.availability import why_not_triton
from geonorm.ops.reference import arithmetic_dtype
from geonorm.ops.transforms import needs_composition, refuse_tangents

NORM_IMPLEMENTATIONS = ("reference", "triton")


def add_rms_norm(
    x: Tensor, u: Tensor, weight: Tensor, *, eps: float = 1e-6, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the sum ``s = x + u`` and its RMSNorm ``weight * s / sqrt(mean(s^2) + eps)``: Pre-Norm between sub-layers.

    Args:
        x: stream, ``[..., d]``, floating point.
        u: sub-layer outputs, the shape of x.
        weight: gain, ``[d]``, floating point; its gradient is summed in float32.
        eps: positive.
        impl: ``"auto"``, ``"reference"`` (composition of torch's functions) or ``"triton"`` (2 reads and 2 writes
            forward, 3 reads and 1 write backward).

    Returns:
        The sum and the norm of the rounded sum, both ``[..., d]`` in x's dtype. Arithmetic is float32 at least.

    Raises:
        UserError: shapes differ, an input is not floating point, or the implementation is unknown or cannot run here.
    """
    eps = _check(x, u, weight, eps)
    if _choose(x, u, weight, impl) == "triton":
        return _add_rms_norm(x, u, weight, eps)
    total = (x + u).to(x.dtype)
    return total, _rms_norm(total, weight, eps, arithmetic_dtype(x, u)).to(x.dtype)


def scaled_add_rms_norm(
    x: Tensor, u: Tensor, weight: Tensor, *, alpha: float = 1.0, eps: float = 1e-6, impl: str = "auto"
) -> Tensor:
    """Return the RMSNorm of ``alpha x + u`` with a gain: Post-Norm (alpha 1) and DeepNorm.

    Arguments and errors as for :func:`add_rms_norm`; ``alpha`` is a positive number. The Triton kernels take 2 reads
    and 1 write forward, 3 reads and 2 writes backward (1 write where alpha is 1 and
    x and u share a dtype).

    Returns:
        ``[..., d]`` in x's dtype; the sum is not rounded in between.
    """
    eps, alpha = _check(x, u, weight, eps), check_positive("alpha", alpha)
    if _choose(x, u, weight, impl) == "triton":
        return _scaled_add_rms_norm(x, u, weight, alpha, eps)
    dtype = arithmetic_dtype(x, u)
    return _rms_norm(alpha * x.to(dtype) + u.to(dtype), weight, eps, dtype).to(x.dtype)


def _rms_norm(z: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return functional.rms_norm(z.to(dtype), z.shape[-1:], weight.to(dtype), eps)


def _check(x: Tensor, u: Tensor, weight: Tensor, eps: float) -> float:
    check_rows(x, u)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES or weight.shape != x.shape[-1:]:
        got = f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise UserError(f"`weight` must be a floating-point tensor of shape {tuple(x.shape[-1:])}, got {got}")
    return check_positive("eps", eps)


def _choose(x: Tensor, u: Tensor, weight: Tensor, impl: str) -> str:
    if impl not in ("auto", *NORM_IMPLEMENTATIONS):
        raise unknown("implementation", impl, [*NORM_IMPLEMENTATIONS, "auto"])
    if impl == "reference" or (impl == "auto" and x.device.type != "cuda"):
        return "reference"
    reason = why_not_triton(x.device, arithmetic_dtype(x, u))
    if impl == "triton" and reason is not None:
        raise UserError(f"impl='triton' cannot run here: {reason}")
    return "triton" if reason is None and not needs_composition(x, u, weight) else "reference"


def _like(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "geonorm::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor u, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def _add_rms_norm(x: Tensor, u: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from benchmarks import norm_kernels

    refuse_tangents("add_rms_norm", x, u, weight)
    total, y = norm_kernels.launch_forward(x, u, weight, 1.0, eps, with_sum=True)
    assert total is not None
    return total, y


@_add_rms_norm.register_fake
def _(x: Tensor, u: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


@torch.library.custom_op(
    "geonorm::scaled_add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor u, Tensor weight, float alpha, float eps) -> Tensor",
)
def _scaled_add_rms_norm(x: Tensor, u: Tensor, weight: Tensor, alpha: float, eps: float) -> Tensor:
    from benchmarks import norm_kernels

    refuse_tangents("scaled_add_rms_norm", x, u, weight)
    return norm_kernels.launch_forward(x, u, weight, alpha, eps, with_sum=False)[1]


@_scaled_add_rms_norm.register_fake
def _(x: Tensor, u: Tensor, weight: Tensor, alpha: float, eps: float) -> Tensor:
    return _like(x)


@torch.library.custom_op(
    "geonorm::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor? g_sum, Tensor x, Tensor? u, Tensor weight, float alpha, float eps, bool apart, "
    "bool need_weight) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    g: Tensor,
    g_sum: Tensor | None,
    x: Tensor,
    u: Tensor | None,
    weight: Tensor,
    alpha: float,
    eps: float,
    apart: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by u, by x where they are told apart (else empty) and by the gain (empty if not needed)."""
    from benchmarks import norm_kernels

    refuse_tangents("add_rms_norm", g, g_sum, x, u, weight)
    by_x, by_sum, by_weight = norm_kernels.launch_backward(g, g_sum, x, u, weight, alpha, eps, apart, need_weight)
    return by_sum, x.new_empty(0) if by_x is by_sum else by_x, x.new_empty(0) if by_weight is None else by_weight


@_backward_op.register_fake
def _(
    g: Tensor,
    g_sum: Tensor | None,
    x: Tensor,
    u: Tensor | None,
    weight: Tensor,
    alpha: float,
    eps: float,
    apart: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = x.new_empty(0)
    return _like(x if u is None else u), _like(x) if apart else nothing, _like(weight) if need_weight else nothing


def _gradients(
    g: Tensor,
    g_sum: Tensor | None,
    x: Tensor,
    u: Tensor | None,
    weight: Tensor,
    alpha: float,
    eps: float,
    apart: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the backward operation returns; made of torch's functions where it is differentiated again."""
    if not torch.is_grad_enabled() and not needs_composition(g, g_sum, x, u, weight):
        by_u, by_x, by_weight = _backward_op(g, g_sum, x, u, weight, alpha, eps, apart, need_weight)
        return by_u, by_x if apart else by_u, by_weight if need_weight else None
    dtype = arithmetic_dtype(x, x if u is None else u)
    z = x.to(dtype) if u is None else alpha * x.to(dtype) + u.to(dtype)
    root = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    normed, g_normed = z * root, g.to(dtype) * weight.to(dtype)
    grad = root * (g_normed - normed * (g_normed * normed).mean(-1, keepdim=True))
    if g_sum is not None:
        grad = grad + g_sum.to(dtype)
    by_weight = (g.to(dtype) * normed).sum_to_size(weight.shape).to(weight.dtype) if need_weight else None
    return grad.to((x if u is None else u).dtype), (alpha * grad).to(x.dtype), by_weight


def _setup_sum(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, u, weight, ctx.eps = inputs
    ctx.u_dtype = u.dtype
    # The sum is kept alive as the stream anyway; x and u need not be.
    ctx.save_for_backward(output[0], weight)


def _backward_sum(ctx: Any, g_sum: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    grad, _, by_weight = _gradients(g, g_sum, total, None, weight, 1.0, ctx.eps, False, ctx.needs_input_grad[2])
    return grad, grad.to(ctx.u_dtype), by_weight, None


def _setup_scaled(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, u, weight, ctx.alpha, ctx.eps = inputs
    ctx.save_for_backward(x, u, weight)


def _backward_scaled(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, u, weight = ctx.saved_tensors
    # Post-Norm's two gradients are one tensor, unless the stream has a wider dtype and would lose digits in u's.
    apart = ctx.alpha != 1.0 or x.dtype != u.dtype
    by_u, by_x, by_weight = _gradients(g, None, x, u, weight, ctx.alpha, ctx.eps, apart, ctx.needs_input_grad[2])
    return by_x, by_u, by_weight, None, None


_add_rms_norm.register_autograd(_backward_sum, setup_context=_setup_sum)
_scaled_add_rms_norm.register_autograd(_backward_scaled, setup_context=_setup_scaled)
