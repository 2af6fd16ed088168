"""The step as operations that PyTorch knows by name: ``torch.ops.geonorm.sphere_step`` and ``sphere_step_cpp``.

Compilers and exporters see one node, whatever runs inside: the analytic function or the Triton kernels in the first,
the C++ kernels in the second, which ``step_cpu.cpp`` defines and which gets its shapes and its autograd formula here
once its library is loaded. Each has a backward, an operation as well. Schemas hold plain types only, so the retraction
travels as its exponent p, a step size that is a number beside the tensor that may stand in its place, and what must be
differentiated as three flags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geonorm.geometry import retraction_exponent
from geonorm.ops import autograd
from geonorm.ops.reference import sphere_step_reference
from geonorm.ops.transforms import needs_composition, refuse_tangents

_library = torch.library.Library("geonorm", "FRAGMENT")
_OPTIONS = "Tensor? alpha, float step, float exponent, float? max_angle, float? radius, bool triton"


@torch.library.custom_op("geonorm::sphere_step", mutates_args=(), schema=f"(Tensor x, Tensor u, {_OPTIONS}) -> Tensor")
def _sphere_step(
    x: Tensor,
    u: Tensor,
    alpha: Tensor | None,
    step: float,
    exponent: float,
    max_angle: float | None,
    radius: float | None,
    triton: bool,
) -> Tensor:
    refuse_tangents("sphere_step", x, u, alpha)
    size = step if alpha is None else alpha
    if triton:
        from geonorm.ops import launch

        return launch.step_forward(x, u, size, exponent, max_angle, radius)
    return autograd.step_forward(x, u, size, exponent, max_angle, radius).contiguous()


@_sphere_step.register_fake
def _fake_step(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "geonorm::sphere_step_backward",
    mutates_args=(),
    schema=f"(Tensor g, Tensor x, Tensor u, {_OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def _sphere_step_backward(
    g: Tensor,
    x: Tensor,
    u: Tensor,
    alpha: Tensor | None,
    step: float,
    exponent: float,
    max_angle: float | None,
    radius: float | None,
    triton: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_tangents("sphere_step", g, x, u, alpha)
    size = step if alpha is None else alpha
    if triton:
        from geonorm.ops import launch

        backward = launch.step_backward
    else:
        backward = autograd.step_backward
    grads = backward(g, x, u, size, exponent, max_angle, radius, needs)
    # A schema cannot say "tensor or nothing" about a result, so what nobody asked for is an empty tensor.
    by_x, by_u, by_alpha = (x.new_empty(0) if value is None else value.contiguous() for value in grads)
    return by_x, by_u, by_alpha


@_sphere_step_backward.register_fake
def _fake_backward(g: Tensor, x: Tensor, u: Tensor, alpha: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_x, by_u, by_alpha = (
        torch.empty_like(like, memory_format=torch.contiguous_format) if need and like is not None else x.new_empty(0)
        for like, need in zip((x, u, alpha), rest[-1], strict=True)
    )
    return by_x, by_u, by_alpha


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, u, alpha, *ctx.options = inputs
    ctx.has_alpha = alpha is not None
    ctx.save_for_backward(x, u, *([alpha] if ctx.has_alpha else []))


def _backward_by(operation: Any) -> Any:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, u, *rest = ctx.saved_tensors
        alpha = rest[0] if ctx.has_alpha else None
        needs = [bool(need) for need in ctx.needs_input_grad[:3]]
        if torch.is_grad_enabled() or needs_composition(g, x, u, alpha):
            # To be differentiated again, or mapped over gradients: only torch's own functions can be.
            step, exponent, max_angle, radius = ctx.options[:4]
            size = step if alpha is None else alpha
            grads = autograd.step_backward(g, x, u, size, exponent, max_angle, radius, needs)
        else:
            grads = operation(g, x, u, alpha, *ctx.options, needs)
        return (
            *(value if need else None for value, need in zip(grads, needs, strict=True)),
            *[None] * len(ctx.options),
        )

    return backward


_sphere_step.register_autograd(_backward_by(_sphere_step_backward), setup_context=_setup_context)


def _compose(operation: str, step: Any, backward: Any) -> None:
    """Have the transforms of ``torch.func`` see torch's own functions in the place of an operation and its backward.

    They would refuse it, or drop a forward tangent without a word.
    """
    _library.impl(operation, step, "FuncTorchDynamicLayerFrontMode")
    _library.impl(f"{operation}_backward", backward, "FuncTorchDynamicLayerFrontMode")


def _composed_step(x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any) -> Tensor:
    exponent, max_angle, radius, *_ = options
    return sphere_step_reference(x, u, step if alpha is None else alpha, exponent, max_angle, radius).contiguous()


def _composed_backward(
    g: Tensor, x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any
) -> tuple[Tensor, ...]:
    exponent, max_angle, radius, *_, needs = options
    size = step if alpha is None else alpha
    grads = autograd.step_backward(g, x, u, size, exponent, max_angle, radius, needs)
    return tuple(x.new_empty(0) if value is None else value.contiguous() for value in grads)


_compose("sphere_step", _composed_step, _composed_backward)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError("geonorm::sphere_step_cpp_backward has no derivative; geonorm.sphere_step has, of any order")


def register_cpp() -> None:
    """Give the C++ operations, once loaded, their shapes and their autograd formula."""
    library = torch.ops.geonorm
    torch.library.register_fake("geonorm::sphere_step_cpp", _fake_step)
    torch.library.register_fake("geonorm::sphere_step_cpp_backward", _fake_backward)
    torch.library.register_autograd(
        "geonorm::sphere_step_cpp", _backward_by(library.sphere_step_cpp_backward), setup_context=_setup_context
    )
    torch.library.register_autograd("geonorm::sphere_step_cpp_backward", _no_second_derivative)
    _compose("sphere_step_cpp", _composed_step, _composed_backward)


def _call(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None,
    triton: bool,
) -> Tensor:
    tensor, step = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    return _sphere_step(x, u, tensor, step, retraction_exponent(retraction), max_angle, radius, triton)


def sphere_step_op(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None = None,
) -> Tensor:
    """The registered operation over the analytic function: one node to every compiler, never fused with neighbours.

    Arguments as the reference takes them. The result is contiguous.
    """
    return _call(x, u, alpha, retraction, max_angle, radius, False)


def sphere_step_triton(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None = None,
) -> Tensor:
    """The registered operation over the Triton kernels, arithmetic in float32; otherwise as :func:`sphere_step_op`."""
    return _call(x, u, alpha, retraction, max_angle, radius, True)


def sphere_step_cpp(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None = None,
) -> Tensor:
    """The operation of the C++ kernels, which have to be loaded; otherwise as :func:`sphere_step_op`."""
    tensor, step = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    return torch.ops.geonorm.sphere_step_cpp(x, u, tensor, step, retraction_exponent(retraction), max_angle, radius)
