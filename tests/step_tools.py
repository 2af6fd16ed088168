"""What the tests of the step share: rows, and y with its gradients on fresh leaves."""

from __future__ import annotations

import pytest
import torch

import mp_step
from geonorm import UserError, sphere_step
from geonorm.ops import IMPLEMENTATIONS, build_cpu
from geonorm.ops.availability import why_not_triton
from tolerances import EPS, spacing, step_bound


def why_cpp_is_not_tested():
    """Build the C++ kernels, once for all workers and all runs; what the compiler lacks, if that fails."""
    try:
        build_cpu()
    except UserError as error:
        return str(error)
    return None


WHY_NOT_CPP = why_cpp_is_not_tested()
CPP = pytest.param("cpp", marks=pytest.mark.skipif(WHY_NOT_CPP is not None, reason=str(WHY_NOT_CPP)))
# The Triton kernels need a GPU or an interpreter, and have no float64: test_triton.py is theirs.
IMPLS = sorted(set(IMPLEMENTATIONS) - {"triton", *(["cpp"] if WHY_NOT_CPP else [])})
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        why_not_triton(torch.device("cpu"), torch.float32) is not None,
        reason="triton is not installed, or does not interpret here",
    ),
)
RETRACTIONS = mp_step.RETRACTIONS
both = pytest.mark.parametrize("impl", [*(impl for impl in IMPLS if impl != "cpp"), CPP])
every_retraction = pytest.mark.parametrize("retraction", RETRACTIONS)


def rows(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def step_and_gradients(x, u, alpha, g, **options):
    """y and the gradients of <g, y> by x, u and alpha, on fresh leaves."""
    x, u = (value.detach().clone().requires_grad_() for value in (x, u))
    alpha = x.new_tensor([alpha], dtype=torch.promote_types(x.dtype, torch.float32)).requires_grad_()
    y = sphere_step(x, u, alpha, **options)
    return (y.detach(), *torch.autograd.grad(y, (x, u, alpha), g))


def in_double(x, u, alpha, g, **options):
    return step_and_gradients(x.double(), u.double(), alpha, g.double(), **{**options, "impl": "reference"})


K1_ROWS = {
    "fp16 300": (torch.float16, lambda n: torch.full((n,), 300.0)),
    "fp16 1e-4": (torch.float16, lambda n: torch.full((n,), 1e-4)),
    "fp32 1e20": (torch.float32, lambda n: torch.full((n,), 1e20)),
    "fp32 1e-30": (torch.float32, lambda n: torch.full((n,), 1e-30)),
    "fp32 1e36": (torch.float32, lambda n: torch.full((n,), 1e36)),
    "fp32 one 1e36 among 1e30": (torch.float32, lambda n: torch.full((n,), 1e30).index_fill(0, torch.tensor(5), 1e36)),
    "fp32 subnormal": (torch.float32, lambda n: torch.full((n,), 1e-41)),
    "fp32 one 1e3 among 1e-3": (torch.float32, lambda n: torch.full((n,), 1e-3).index_fill(0, torch.tensor(5), 1e3)),
    "fp64 1e200": (torch.float64, lambda n: torch.full((n,), 1e200, dtype=torch.float64)),
}  # fmt: skip


def check_extreme_rows(name, dim, impl, device="cpu"):
    """Rows far outside the range of squares: finite, and as exact as any other."""
    dtype, make = K1_ROWS[name]
    row = make(dim).to(dtype)
    sign = torch.where(torch.arange(dim) % 3 == 0, -1.0, 1.0).to(dtype)
    x, u = torch.stack([row, row * sign]), torch.stack([row * sign, row.flip(0) * sign])
    g = rows(2, dim, dtype=dtype, grad=False)
    x, u, g = (value.to(device) for value in (x, u, g))
    got = step_and_gradients(x, u, 0.5, g, impl=impl)
    scale = x.double().abs().amax()
    # In float64 the same numbers, brought to about 1 by an exact factor, are no longer extreme.
    factor = torch.exp2(-torch.floor(torch.log2(scale)))
    y, grad_x, grad_u, grad_alpha = in_double(x.double() * factor, u.double() * factor, 0.5, g)
    want = (y / factor, grad_x, grad_u, grad_alpha / factor)
    bound = step_bound(torch.promote_types(dtype, torch.float32), dim)
    for value, exact in zip(got[:3], want[:3], strict=True):
        assert bool(value.isfinite().all())
        allowed = bound * exact.abs().amax(-1, keepdim=True) + spacing(exact, dtype)
        assert bool(((value.double() - exact).abs() <= allowed).all())
    # The gradient of alpha is a sum whose terms may cancel: judged by the size of the terms.
    terms = float((g.double().norm(dim=-1) * u.double().norm(dim=-1)).sum())
    assert abs(float(got[3]) - float(want[3])) <= bound * terms + dim * torch.finfo(torch.float32).tiny


def check_half_precision(dtype, retraction, impl, device="cpu", size=1.0, max_angle=0.7):
    """The error is the rounding of the result: no more than twice that of the exact result."""
    dim = 96
    x, u, g = (rows(50, dim, dtype=dtype, grad=False).to(device) for _ in range(3))
    u = u * size
    options = {"retraction": retraction, "max_angle": max_angle, "radius": None}
    got = step_and_gradients(x, u, 0.8, g, impl=impl, **options)
    want = in_double(x, u, 0.8, g, **options)
    for name, value, exact in zip(("y", "grad_x", "grad_u"), got[:3], want[:3], strict=True):
        assert value.dtype == dtype
        error = (value.double() - exact).abs()
        # Where entries cancel, the float32 arithmetic inside shows; elsewhere half a spacing is the rounding.
        noise = size * step_bound(torch.float32, dim) * exact.square().mean(-1, keepdim=True).sqrt()
        assert bool((error <= spacing(exact, dtype) + noise).all()), name
        rounding = (exact.to(dtype).double() - exact).norm()
        assert float(error.norm()) <= 2 * float(rounding), name


def check_radius_along_the_row(step, dtype, dim, device="cpu"):
    """``|y| = |x|`` where u lies ever more along x: 4 eps sqrt(d), and the rounding of y where that is coarser."""
    for times in (1, 4, 10, 100, 1e4, 1e6):
        x, v = (rows(max(4, 4096 // dim), dim, dtype=dtype, grad=False) for _ in range(2))
        # In float32, whatever the dtype of x: bfloat16 would keep nothing of v beside 1000 x.
        for u in (times * x.double() + v.double(), -times * x.double() + v.double()):
            y = step(x.to(device), u.float().to(device)).cpu().double()
            error = (y.norm(dim=-1) / x.double().norm(dim=-1) - 1).abs().max()
            assert float(error) <= max(step_bound(torch.float32, dim), EPS[dtype] / 2), times
