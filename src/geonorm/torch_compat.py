"""Every private name of torch that geonorm leans on. What a new torch breaks is mended here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
# The key under which an operation is looked up inside a transform of torch.func.
INSIDE_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"


def constant_to_compilers(function: Function) -> Function:
    """Have compilers take what a function returns for a constant, instead of tracing into it.

    All that ``torch.compiler.assume_constant_result`` does; using that imports the whole compiler, and triton.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


# Marked because compilers enter the transforms themselves while they trace.
@constant_to_compilers
def in_transform() -> bool:
    """Whether this runs inside a transform of ``torch.func`` (grad, jvp, vmap, ...)."""
    return torch._C._are_functorch_transforms_active()


def allow_compilations(count: int) -> None:
    """Let a function be compiled at least so often for different modules, before the compiler leaves it as it is."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)


def without_data() -> contextlib.AbstractContextManager[Any]:
    """While open, new tensors have a shape, a dtype and a device, and no data; older ones may stand beside them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_id(tensor: Tensor) -> int:
    """A number that tensors have in common which share memory, also where there is no data; valid while it lives."""
    return tensor.untyped_storage()._cdata
