"""The step as compilers trace it on a CPU, where float32 rows are summed in float64 and nothing is scaled."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from geonorm import geometry, sphere_step
from geonorm.ops import which
from step_tools import (
    CPP,
    K1_ROWS,
    TRITON,
    check_extreme_rows,
    check_radius_along_the_row,
    in_double,
    rows,
    step_and_gradients,
)
from tolerances import spacing, step_bound, worst


@pytest.fixture(scope="module")
def step():
    """One compiled step for all tests, since tracing takes seconds; no code is generated."""
    torch._dynamo.reset()
    return torch.compile(sphere_step, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.fixture
def compiled(step, monkeypatch):
    """Have the tools of the tests take every step compiled."""
    monkeypatch.setattr("step_tools.sphere_step", step)


@pytest.mark.parametrize("name", sorted(K1_ROWS))
def test_extreme_rows(name, compiled):
    check_extreme_rows(name, 64, "auto")


@pytest.mark.parametrize("off", [0.0, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_nearly_along_the_row(dtype, off, compiled):
    x, g = (rows(20, 64, dtype=dtype, grad=False) for _ in range(2))
    u = (1.5 * x.double() + off * torch.randn(20, 64).double()).to(dtype)
    options = {"radius": 2.0, "max_angle": 0.3}
    got, want = step_and_gradients(x, u, 0.8, g, **options), in_double(x, u, 0.8, g, **options)
    bound = step_bound(torch.float32, 64)
    for value, exact in zip(got[:3], want[:3], strict=True):
        allowed = bound * exact.abs().amax(-1, keepdim=True) + spacing(exact, dtype)
        assert bool(((value.double() - exact).abs() <= allowed).all())
    # Every term of this sum is small with the tangent part, and so is what is allowed; |v| itself ends in rounding.
    length = geometry.tangent(x.double(), u.double()).norm(dim=-1) + bound * u.double().norm(dim=-1)
    terms = float((g.double().norm(dim=-1) * length).sum())
    assert abs(float(got[3]) - float(want[3])) <= bound * terms


def test_zero_rows_and_padding_of_nan_leave_the_others_alone(compiled):
    x, u, g = (rows(8, 24, dtype=torch.float32, grad=False) for _ in range(3))
    keep = [0, 2, 4, 6, 7]
    alone = step_and_gradients(x[keep], u[keep], 0.8, g[keep], max_angle=0.6)
    x[1], u[1], x[3], x[5], u[5] = 0, 1e30, 0, torch.nan, torch.nan
    got = step_and_gradients(x, u, 0.8, g, max_angle=0.6)
    for value, other in zip(got[:3], alone[:3], strict=True):
        assert torch.equal(value[keep], other)
        assert not value[[1, 3]].any()
        assert bool(value[5].isnan().all())


@pytest.mark.parametrize("options", [{}, {"retraction": "cayley", "radius": 2.0}], ids=str)
def test_tensor_alpha_without_a_limit_of_the_angle(options, compiled):
    torch._dynamo.reset()  # A compiled function is traced anew for so many dtypes and options only.
    for batch in (3, 5):
        x, u, g = (rows(2, batch, 12, dtype=torch.float32, grad=False) for _ in range(3))
        got, want = step_and_gradients(x, u, 0.8, g, **options), in_double(x, u, 0.8, g, **options)
        for value, exact in zip(got, want, strict=True):
            assert worst(value, exact) <= 4 * step_bound(torch.float32, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_radius_holds_however_far_u_lies_along_the_row(dtype, step):
    torch._dynamo.reset()  # As above.
    check_radius_along_the_row(step, dtype, 64)


@pytest.mark.parametrize("impl", ["auto", "autograd", CPP, TRITON, "reference"])
def test_tensors_without_data(impl):
    with FakeTensorMode():
        x, u, alpha = (torch.empty(*shape, requires_grad=True) for shape in ((3, 8), (3, 8), (1,)))
        y = sphere_step(x, u, alpha, max_angle=0.5, radius=2.0, impl=impl)
        y.sum().backward()
        assert (y.shape, x.grad.shape, u.grad.shape, alpha.grad.shape) == ((3, 8), (3, 8), (3, 8), (1,))


@pytest.mark.parametrize("impl", [CPP])
def test_tensors_without_data_where_the_kernels_are_built(impl, monkeypatch):
    monkeypatch.delenv("GEONORM_CPP", raising=False)
    with FakeTensorMode():
        x, u = torch.empty(3, 8, requires_grad=True), torch.empty(3, 8, requires_grad=True)
        assert which(x) == impl
        sphere_step(x, u).sum().backward()
        assert (x.grad.shape, u.grad.shape) == ((3, 8), (3, 8))
