"""The sphere: exp and log undo each other, angles keep their digits, extreme rows stay finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geonorm import UserError, geometry
from tolerances import EPS, SAME_64, SMALL_ANGLE, spacing, step_bound, worst

DTYPES = [torch.float64, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
examples = settings(max_examples=60, deadline=None, derandomize=True)


def rows(*shape, dtype=torch.float64, seed=None):
    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def pair(*shape, dtype=torch.float64):
    return rows(*shape, dtype=dtype, seed=1), rows(*shape, dtype=dtype, seed=2)


def constant(count, value):
    return torch.full((count,), value, dtype=torch.float64)


# --- exp, log, distance ---------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("dim", [2, 3, 64, 500])
def test_exp_undoes_log(dim, dtype):
    x, y = pair(40, dim, dtype=dtype)
    reached = geometry.exp(x, geometry.log(x, y))
    wanted = y * (x.norm(dim=-1) / y.norm(dim=-1)).unsqueeze(-1)
    assert worst(reached, wanted) <= 2 * step_bound(dtype, dim)


@every_dtype
@pytest.mark.parametrize("size", [1e-2, 0.5, 3.0])
def test_log_undoes_exp(size, dtype):
    x, u = pair(40, 16, dtype=dtype)
    v = geometry.tangent(x, u)
    v = size * v * x.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True)
    # Near pi the direction of log is that of a short vector, so its error grows as 1/sin.
    assert worst(geometry.log(x, geometry.exp(x, v)), v) <= 4 * step_bound(dtype, 16) * size / math.sin(size)


@given(st.integers(2, 40), st.integers(0, 2**31), st.floats(0.01, 3.0), st.integers(-60, 60))
@examples
def test_great_circle_properties(dim, seed, angle, power):
    x, u = rows(3, dim, seed=seed) * 2.0**power, rows(3, dim, seed=seed + 1) * 2.0**power
    v = geometry.tangent(x, u)
    length = geometry.norm(x)
    v = v / geometry.norm(v) * angle * length
    y = geometry.exp(x, v)
    ones = torch.ones(3, 1, dtype=torch.float64)
    assert worst(geometry.norm(y) / length, ones) <= SAME_64
    assert worst((v * x).sum(-1, keepdim=True) / length**2, 0 * ones) <= SAME_64
    assert worst(geometry.angle(x, y), constant(3, angle)) <= SAME_64
    assert worst(geometry.distance(x, y) / length.squeeze(-1), angle * ones.squeeze(-1)) <= SAME_64
    assert worst(geometry.norm(geometry.log(x, y)) / length, angle * ones) <= SAME_64
    half = geometry.exp(x, v / 2)
    assert worst(geometry.angle(x, half) + geometry.angle(half, y), geometry.angle(x, y)) <= SAME_64


@given(st.integers(1, 30), st.integers(0, 2**31))
@examples
def test_angle_is_a_metric(dim, seed):
    x, y, z = (rows(4, dim, seed=seed + i) for i in range(3))
    assert torch.equal(geometry.angle(x, y), geometry.angle(y, x))
    assert not geometry.angle(x, x).any()
    assert worst(geometry.angle(x, 3.7 * x), torch.zeros(4)) <= SAME_64
    assert bool((geometry.angle(x, z) <= geometry.angle(x, y) + geometry.angle(y, z) + SAME_64).all())
    assert worst(geometry.angle(x, y) + geometry.angle(x, -y), constant(4, math.pi)) <= SAME_64


@given(st.integers(2, 30), st.integers(0, 2**31), st.floats(-3, 3))
@examples
def test_tangent_removes_what_lies_along_x_and_nothing_else(dim, seed, along):
    x, u = rows(3, dim, seed=seed), rows(3, dim, seed=seed + 1)
    v = geometry.tangent(x, u)
    assert worst(geometry.tangent(x, u + along * x), v) <= SAME_64
    assert worst(geometry.tangent(x, v), v) <= SAME_64
    assert worst(geometry.tangent(-5 * x, u), v) <= SAME_64
    unit = x / x.norm(dim=-1, keepdim=True)
    assert worst(v + (u * unit).sum(-1, keepdim=True) * unit, u) <= SAME_64


def test_geoopt_agrees_on_the_unit_sphere():
    geoopt = pytest.importorskip("geoopt")
    sphere = geoopt.manifolds.Sphere()
    x, y = pair(50, 12)
    x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    u = rows(50, 12, seed=3)
    v = sphere.proju(x, u)
    assert worst(geometry.tangent(x, u), v) <= SAME_64
    assert worst(geometry.exp(x, v), sphere.expmap(x, v)) <= SAME_64
    assert worst(geometry.log(x, y), sphere.logmap(x, y)) <= SAME_64
    assert worst(geometry.distance(x, y), sphere.dist(x, y)) <= SAME_64
    assert worst(geometry.retract(x, v, "projection"), sphere.retr(x, v)) <= SAME_64


@pytest.mark.parametrize("angle", [1e-3, 1e-4, 1e-5])
def test_small_angles_in_float32(angle):
    x, u = pair(200, 256)
    v = geometry.tangent(x, u)
    y = geometry.exp(x, v * angle * geometry.norm(x) / geometry.norm(v)).float()
    exact = geometry.angle(x.float().double(), y.double())
    got = geometry.angle(x.float(), y)
    bound = SMALL_ANGLE if angle >= 1e-4 else 10 * SMALL_ANGLE
    assert float(((got.double() - exact) / exact).abs().max()) <= bound
    # What the arc cosine would have returned: the reason for the two-norm form.
    cos = torch.nn.functional.cosine_similarity(x.float(), y).clamp(-1, 1)
    assert float(((cos.acos().double() - exact) / exact).abs().max()) > bound


@every_dtype
def test_angles_near_pi_keep_their_digits(dtype):
    x, u = pair(50, 64)
    v = geometry.tangent(x, u)
    y = geometry.exp(x, v * (math.pi - 1e-3) * geometry.norm(x) / geometry.norm(v))
    gap = math.pi - geometry.angle(x.to(dtype), y.to(dtype)).double()
    assert float((gap / 1e-3 - 1).abs().max()) <= (SMALL_ANGLE if dtype == torch.float32 else 1e-9)


@every_dtype
@pytest.mark.parametrize("dim", [2, 5, 64])
def test_antipodes(dim, dtype):
    x = rows(30, dim, dtype=dtype)
    for y in (-x, -2.5 * x):
        theta = geometry.angle(x, y)
        assert worst(theta, constant(30, math.pi)) <= 8 * EPS[dtype]
        v = geometry.log(x, y)
        assert worst(v.norm(dim=-1) / x.norm(dim=-1), constant(30, math.pi)) <= 2 * step_bound(dtype, dim)
        assert worst((v * x).sum(-1) / x.square().sum(-1), torch.zeros(30)) <= 2 * step_bound(dtype, dim)
        assert worst(geometry.exp(x, v), -x) <= 4 * step_bound(dtype, dim)
    assert not geometry.log(x, x).any()


@every_dtype
@pytest.mark.parametrize("y", ["same", "opposite", "zero", "both zero"])
def test_gradients_are_finite_where_the_angle_has_a_corner(y, dtype):
    x = rows(4, 6, dtype=dtype)
    other = {"same": x.clone(), "opposite": -x, "zero": 0 * x, "both zero": 0 * x}[y]
    x = (0 * x if y == "both zero" else x).requires_grad_()
    other.requires_grad_()
    for function in (geometry.angle, geometry.distance, geometry.log):
        grads = torch.autograd.grad(function(x, other).sum(), (x, other))
        assert all(bool(gradient.isfinite().all()) for gradient in grads), function.__name__


@every_dtype
def test_one_dimension_has_no_tangent(dtype):
    x, y = pair(40, 1, dtype=dtype)
    assert not geometry.log(x, y).any()
    assert bool((geometry.tangent(x, y).abs() <= 2 * EPS[dtype] * y.abs()).all())
    assert worst(geometry.angle(x, y), math.pi * ((x * y) < 0).double().squeeze(-1)) <= 2 * EPS[dtype]


@pytest.mark.parametrize("function", [geometry.tangent, geometry.angle, geometry.distance, geometry.log, geometry.exp])
def test_gradcheck(function):
    x, y = pair(3, 5)
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), y.requires_grad_()))


# --- lengths --------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("value", [1e-30, 1e20, 1.0, 3e37, 1e-40])
def test_norm_neither_over_nor_underflows(value, dtype):
    x = torch.full((1, 16), value, dtype=dtype)
    exact = 4 * float(x[0, 0])
    assert abs(float(geometry.norm(x)) - exact) <= 4 * EPS[dtype] * exact + float(spacing(torch.tensor(exact), dtype))
    assert worst(geometry.angle(x, 2 * x), torch.zeros(1)) <= 4 * EPS[dtype]


@pytest.mark.parametrize("size", [1e20, 1e-30])
def test_extreme_rows_in_float32(size):
    x, y = pair(10, 32, dtype=torch.float32)
    big_x, big_y = x * size, y * size
    assert worst(geometry.angle(big_x, big_y), geometry.angle(x, y)) <= step_bound(torch.float32, 32)
    for function in (geometry.tangent, geometry.log, geometry.exp):
        want = function(x.double(), y.double())
        assert worst(function(big_x, big_y).double() / size, want) <= 2 * step_bound(torch.float32, 32), function
    mixed = geometry.angle(x * 1e20, y * 1e-30)
    assert worst(mixed, geometry.angle(x, y)) <= step_bound(torch.float32, 32)


@every_dtype
def test_zero_rows(dtype):
    x, y = pair(3, 8, dtype=dtype)
    x[1] = 0
    assert torch.equal(geometry.tangent(x, y)[1], y[1])
    assert float(geometry.norm(x)[1]) == 0
    for got in (
        geometry.angle(x, y),
        geometry.angle(y, x),
        geometry.distance(x, y),
        geometry.log(x, y),
        geometry.log(y, x),
    ):
        assert not got[1].any()
        assert bool(got.isfinite().all())
    assert not geometry.exp(x, y)[1].any()
    x.requires_grad_()
    for function in (geometry.norm, lambda z: geometry.exp(z, y), lambda z: geometry.angle(z, y)):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert bool(gradient.isfinite().all())
        assert not gradient[1].any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 5)])
def test_empty_tensors(shape):
    x, y = torch.zeros(shape), torch.zeros(shape)
    for function in (geometry.tangent, geometry.exp, geometry.log):
        assert function(x, y).shape == torch.Size(shape)
    assert geometry.angle(x, y).shape == torch.Size(shape[:-1])
    assert geometry.norm(x).shape == torch.Size((*shape[:-1], 1))


@given(st.floats(1e-37, 1e37) | st.just(0.0), st.sampled_from(DTYPES))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_row_scale_is_the_power_of_two_below(value, dtype):
    x = torch.tensor([[0.0, -value, value / 3]], dtype=dtype)
    scale = float(geometry.row_scale(x))
    assert math.frexp(scale)[0] == 0.5
    if value == 0:
        assert scale == 1
    else:
        assert scale <= float(x.abs().max()) < 2 * scale
    assert torch.equal(x / scale * scale, x)


def test_row_scale_of_numbers_that_are_not_finite_is_one():
    x = torch.tensor([[math.nan, 1e9], [math.inf, 1e9], [0.0, 0.0]])
    assert geometry.row_scale(x).flatten().tolist() == [1, 1, 1]


# --- retractions ----------------------------------------------------------------------------------------------------

PHI = {
    "exponential": lambda t: t,
    "projection": math.atan,
    "cayley": lambda t: 2 * math.atan(t / 2),
    0.3: lambda t: 0.3 * math.atan(t / 0.3),
    5: lambda t: 5 * math.atan(t / 5),
    1e6: lambda t: 1e6 * math.atan(t / 1e6),
}


def test_every_named_retraction_has_its_angle_here():
    assert set(geometry.RETRACTIONS) <= set(PHI)


@pytest.mark.parametrize("retraction", PHI, ids=str)
@pytest.mark.parametrize("max_angle", [None, 0.4])
def test_factors_are_cosine_and_sine_over_t(retraction, max_angle):
    for t in (1e-9, 1e-3, 0.05, 0.13, 0.141, 0.1415, 0.49, 0.4999, 0.5001, 0.9, 2.0, 3.2, 9.0, 60.0):
        theta = PHI[retraction](t)
        if max_angle is not None:
            theta = min(theta, max_angle)
        q = torch.tensor([t * t], dtype=torch.float64)
        cos, sin_ratio = geometry.step_factors(q, retraction, max_angle)
        tolerance = 8 * EPS[torch.float64] * max(1.0, t)
        assert abs(float(cos) - math.cos(theta)) <= tolerance, t
        assert abs(float(sin_ratio) - math.sin(theta) / t) <= tolerance, t
    cos, sin_ratio = geometry.step_factors(torch.zeros(1), retraction, max_angle)
    assert (float(cos), float(sin_ratio)) == (1.0, 1.0)


@pytest.mark.parametrize("retraction", PHI, ids=str)
@pytest.mark.parametrize("max_angle", [None, 0.4])
def test_slopes_are_the_derivatives_of_the_factors(retraction, max_angle):
    t = torch.tensor([0.0, 1e-9, 1e-3, 0.05, 0.13, 0.1415, 0.499, 0.501, 2.0, 3.2, 9.0], dtype=torch.float64)
    q = (t * t).requires_grad_()
    factors = geometry.step_factors(q, retraction, max_angle)
    slopes = geometry.step_factor_slopes(q.detach(), *(f.detach() for f in factors), retraction, max_angle)
    for factor, slope in zip(factors, slopes, strict=True):
        (want,) = torch.autograd.grad(factor.sum(), q, retain_graph=True)
        assert worst(slope, want) <= 64 * EPS[torch.float64]


def test_slopes_at_zero_are_the_series_terms():
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for retraction, p in (("exponential", math.inf), ("projection", 1.0), ("cayley", 2.0), (0.3, 0.3)):
        cos_slope, sin_slope = geometry.step_factor_slopes(zero, one, one, retraction)
        assert float(cos_slope) == pytest.approx(-1 / 2, rel=1e-14)
        assert float(sin_slope) == pytest.approx(-1 / 6 - 1 / (3 * p**2), rel=1e-14)


def test_retraction_names_and_exponents():
    assert [geometry.retraction_exponent(name) for name in ("projection", "cayley", "exponential", math.inf, 3)] == [
        1.0, 2.0, math.inf, math.inf, 3.0,
    ]  # fmt: skip
    x, u = pair(3, 5)
    w = geometry.tangent(x, u)
    for name, p in (("projection", 1), ("cayley", 2), ("exponential", math.inf)):
        assert torch.equal(geometry.retract(x, w, name), geometry.retract(x, w, p))


@pytest.mark.parametrize("function", [geometry.norm, geometry.row_scale, lambda x: geometry.angle(x, x)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_narrow_dtypes_are_refused_by_name(function, dtype):
    with pytest.raises(UserError, match=f"geometry works in float32 or float64, got {dtype}"):
        function(torch.ones(2, 4, dtype=dtype))


def test_angle_limit():
    assert geometry.angle_limit(math.inf, 0.7) == 0.7
    assert geometry.angle_limit(1.0, 0.7) == pytest.approx(math.tan(0.7))
    assert geometry.angle_limit(2.0, 0.7) == pytest.approx(2 * math.tan(0.35))
    assert geometry.angle_limit(1.0, 1.6) == math.inf
