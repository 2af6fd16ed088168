"""Every private name of torch that geonorm leans on. What a new torch breaks is mended here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

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
