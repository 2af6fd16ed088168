"""The step as operations that PyTorch knows by name: ``torch.ops.geonorm.sphere_step_triton`` and ``sphere_step_cpp``.

Compilers and exporters see one node, whatever runs inside. The kernels of the second lie in ``step_cpu.cpp``, and it
gets its rules here once its library is loaded. Each has a backward, an operation as well. Schemas hold plain types
only, so the retraction travels as its exponent p, a step size that is a number beside the tensor that may stand in its
place, and what must be differentiated as three flags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geonorm.geometry import retraction_exponent
from geonorm.ops import autograd
from geonorm.ops.reference import sphere_step_reference
from geonorm.ops.transforms import needs_composition, refuse_tangents
from geonorm.torch_compat import INSIDE_TRANSFORMS

_library = torch.library.Library("geonorm", "FRAGMENT")
_OPTIONS = "Tensor? alpha, float step, float exponent, float? max_angle, float? radius"


def sphere_step_triton(x: Tensor, u: Tensor, alpha: float | Tensor, retraction: str | float, *options: Any) -> Tensor:
    """The operation of the Triton kernels, arithmetic in float32; arguments as the reference takes them."""
    tensor, step = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    return torch.ops.geonorm.sphere_step_triton(x, u, tensor, step, retraction_exponent(retraction), *options)


def sphere_step_cpp(x: Tensor, u: Tensor, alpha: float | Tensor, retraction: str | float, *options: Any) -> Tensor:
    """The operation of the C++ kernels, which have to be loaded; otherwise as :func:`sphere_step_triton`."""
    tensor, step = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    return torch.ops.geonorm.sphere_step_cpp(x, u, tensor, step, retraction_exponent(retraction), *options)


@torch.library.custom_op(
    "geonorm::sphere_step_triton", mutates_args=(), schema=f"(Tensor x, Tensor u, {_OPTIONS}) -> Tensor"
)
def _step(x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any) -> Tensor:
    from geonorm.ops import launch

    refuse_tangents("geonorm.sphere_step", x, u, alpha)
    return launch.step_forward(x, u, step if alpha is None else alpha, *options)


@torch.library.custom_op(
    "geonorm::sphere_step_triton_backward",
    mutates_args=(),
    schema=f"(Tensor g, Tensor x, Tensor u, {_OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def _backward(g: Tensor, x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any) -> tuple[Tensor, ...]:
    from geonorm.ops import launch

    refuse_tangents("geonorm.sphere_step", g, x, u, alpha)
    return _no_gaps(launch.step_backward(g, x, u, step if alpha is None else alpha, *options), x)


def _no_gaps(grads: tuple[Tensor | None, ...], x: Tensor) -> tuple[Tensor, ...]:
    """A schema cannot say "tensor or nothing" about a result, so what nobody asked for is an empty tensor."""
    return tuple(x.new_empty(0) if value is None else value.contiguous() for value in grads)


def _fake_step(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(g: Tensor, x: Tensor, u: Tensor, alpha: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    wanted = zip((x, u, alpha), rest[-1], strict=True)
    return _no_gaps(tuple(torch.empty_like(like) if need and like is not None else None for like, need in wanted), x)


def _composed_step(x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any) -> Tensor:
    return sphere_step_reference(x, u, step if alpha is None else alpha, *options).contiguous()


def _composed_backward(
    g: Tensor, x: Tensor, u: Tensor, alpha: Tensor | None, step: float, *options: Any
) -> tuple[Tensor, ...]:
    return _no_gaps(autograd.step_backward(g, x, u, step if alpha is None else alpha, *options), x)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, u, alpha, *ctx.options = inputs
    ctx.has_alpha = alpha is not None
    ctx.save_for_backward(x, u, *([alpha] if ctx.has_alpha else []))


def _no_second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError("the backward of geonorm's operations has no derivative; geonorm.sphere_step has, of any order")


def register(name: str) -> None:
    """Give an operation and its backward, both known to torch, their shapes, their derivatives and their composition.

    Inside the transforms of ``torch.func``, which would refuse them or drop a forward tangent without a word, torch's
    own functions take their place.
    """
    step, backward_name = f"geonorm::{name}", f"geonorm::{name}_backward"
    operation = getattr(torch.ops.geonorm, f"{name}_backward")

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, u, *rest = ctx.saved_tensors
        alpha = rest[0] if ctx.has_alpha else None
        needs = [bool(need) for need in ctx.needs_input_grad[:3]]
        # To be differentiated again, or mapped over gradients: only torch's own functions can be.
        again = torch.is_grad_enabled() or needs_composition(g, x, u, alpha)
        grads = (_composed_backward if again else operation)(g, x, u, alpha, *ctx.options, needs)
        wanted = (value if need else None for value, need in zip(grads, needs, strict=True))
        return (*wanted, *[None] * len(ctx.options))

    torch.library.register_fake(step, _fake_step)
    torch.library.register_fake(backward_name, _fake_backward)
    torch.library.register_autograd(step, backward, setup_context=_setup_context)
    torch.library.register_autograd(backward_name, _no_second_derivative)
    _library.impl(name, _composed_step, INSIDE_TRANSFORMS)
    _library.impl(f"{name}_backward", _composed_backward, INSIDE_TRANSFORMS)


register("sphere_step_triton")
