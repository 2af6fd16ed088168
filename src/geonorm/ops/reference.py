"""The step as a plain composition of :mod:`geonorm.geometry`: the oracle for every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from geonorm import geometry


def arithmetic_dtype(x: Tensor, u: Tensor) -> torch.dtype:
    """The dtype that the step computes in: float64 where an input is, else float32."""
    return torch.promote_types(torch.promote_types(x.dtype, u.dtype), torch.float32)


def sphere_step_reference(
    x: Tensor,
    u: Tensor,
    alpha: float | Tensor,
    retraction: str | float,
    max_angle: float | None,
    radius: float | None = None,
) -> Tensor:
    """Tangent part, scaling by alpha, retraction; differentiable to any order by autograd.

    x and u are ``[..., d]``; arithmetic is float32 at least; the result has x's dtype.
    """
    dtype = arithmetic_dtype(x, u)
    point, update = x.to(dtype), u.to(dtype)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(dtype).reshape(())
    w = alpha * geometry.tangent(point, update)
    y = geometry.retract(point, w, retraction, max_angle=max_angle, radius=radius)
    return y.to(x.dtype)
