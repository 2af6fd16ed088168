"""Whether a derivative is being taken that only torch's own functions can follow, not a fused step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from geonorm.torch_compat import in_transform


def needs_composition(*values: Any) -> bool:
    """True inside a transform of ``torch.func`` (grad, jvp, vmap, ...) and where a tensor carries a forward tangent.

    A registered operation would drop the tangent without a word, and PyTorch would hand it the rows of a batch one by
    one.
    """
    return in_transform() or (not torch.compiler.is_compiling() and has_tangent(*values))


def has_tangent(*values: Any) -> bool:
    """Whether a tensor among the values is a dual number of forward-mode differentiation."""
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


def refuse_tangents(name: str, *values: Any) -> None:
    """Raise where a fused operation, called by its own name, would drop a forward tangent.

    Raises:
        RuntimeError: names the function that is right there.
    """
    try:
        found = has_tangent(*values)
    except RuntimeError:  # In a compiled graph PyTorch cannot take a tensor apart there.
        found = True
    if found:
        raise RuntimeError(f"an operation below {name} has no forward-mode derivative; {name} has")
