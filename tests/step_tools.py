"""What the tests of the step share: rows, and y with its gradients on fresh leaves."""

from __future__ import annotations

import pytest
import torch

import mp_step
from geonorm import sphere_step
from geonorm.ops import IMPLEMENTATIONS

# The Triton kernels need a GPU or an interpreter, and have no float64: test_triton.py is theirs.
IMPLS = sorted(set(IMPLEMENTATIONS) - {"triton"})
RETRACTIONS = mp_step.RETRACTIONS
both = pytest.mark.parametrize("impl", IMPLS)
every_retraction = pytest.mark.parametrize("retraction", RETRACTIONS)


def rows(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def step_and_gradients(x, u, alpha, g, **options):
    """y and the gradients of <g, y> by x, u and alpha, on fresh leaves."""
    x, u = (value.detach().clone().requires_grad_() for value in (x, u))
    alpha = torch.tensor([alpha], dtype=torch.promote_types(x.dtype, torch.float32), requires_grad=True)
    y = sphere_step(x, u, alpha, **options)
    return (y.detach(), *torch.autograd.grad(y, (x, u, alpha), g))


def in_double(x, u, alpha, g, **options):
    return step_and_gradients(x.double(), u.double(), alpha, g.double(), **{**options, "impl": "reference"})
