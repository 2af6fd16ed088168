"""The step against 50-digit arithmetic, against itself, and in every dtype."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import mp_step
from geonorm import geometry, sphere_step
from step_tools import (
    IMPLS,
    K1_ROWS,
    RETRACTIONS,
    both,
    check_extreme_rows,
    check_half_precision,
    every_retraction,
    rows,
    step_and_gradients,
)
from tolerances import EPS, ORACLE_64, SAME_64, step_bound, worst

# --- exact values ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("row", mp_step.own_table(), ids=str)
def test_own_reference_rows(row, impl):
    x, u, g = (torch.tensor([value], dtype=torch.float64) for value in (row.x, row.u, row.grad_y))
    options = {"retraction": row.retraction, "max_angle": row.max_angle, "radius": row.radius, "impl": impl}
    got = step_and_gradients(x, u, row.alpha, g, **options)
    for name, value, want in zip(
        ("y", "grad_x", "grad_u", "grad_alpha"), got, (row.y, row.grad_x, row.grad_u, row.grad_alpha), strict=True
    ):
        want = torch.tensor(want, dtype=torch.float64).reshape(value.shape)
        assert worst(value, want) <= ORACLE_64, name


@both
def test_shared_reference_rows(shared_oracle, impl):
    assert len(shared_oracle) >= 60
    for row in shared_oracle:
        x, u, g = (torch.tensor([row[key]], dtype=torch.float64) for key in ("x", "u", "grad_y"))
        name = row["retraction"]
        retraction = float(name[2:]) if name.startswith("p:") else name
        options = {"retraction": retraction, "max_angle": row["max_angle"], "impl": impl}
        got = step_and_gradients(x, u, row["alpha"], g, **options)
        for name, value in zip(("y", "grad_x", "grad_u", "grad_alpha"), got, strict=True):
            want = torch.tensor(row[name], dtype=torch.float64).reshape(value.shape)
            assert worst(value, want) <= ORACLE_64, (row["retraction"], row["regime"], name)


@both
def test_gradient_at_a_zero_step_is_the_projection_and_not_zero(impl):
    x, alpha = rows(3, 6), 0.7
    u = torch.zeros_like(x).requires_grad_()
    g = torch.randn_like(x)
    (grad_u,) = torch.autograd.grad(sphere_step(x, u, alpha, impl=impl), u, g)
    assert worst(grad_u, alpha * geometry.tangent(x.detach(), g)) <= SAME_64


# --- properties -----------------------------------------------------------------------------------------------------


@both
@every_retraction
@pytest.mark.parametrize("size", [1e-8, 1e-2, 0.3, 1.0, 4.0, 50.0])
def test_length_and_angle(retraction, size, impl):
    x, u, alpha = rows(64, 32, grad=False), size * rows(64, 32, grad=False), 0.9
    y = sphere_step(x, u, alpha, retraction=retraction, impl=impl)
    assert worst(y.norm(dim=-1) / x.norm(dim=-1), torch.ones(64)) <= SAME_64
    t = alpha * geometry.tangent(x, u).norm(dim=-1) / x.norm(dim=-1)
    p = {"projection": 1.0, "cayley": 2.0}.get(retraction, retraction)
    theta = t if retraction == "exponential" else p * torch.atan(t / p)
    # The angle between two rows is theta folded into [0, pi]. An absolute bound of a few eps, so that the angles of
    # 1e-8 keep half of their digits; the noise of u's own rounding grows with its size.
    folded = torch.atan2(theta.sin().abs(), theta.cos())
    assert worst(geometry.angle(x, y), folded) <= 64 * EPS[torch.float64] * max(1.0, size)


@both
@every_retraction
@pytest.mark.parametrize("max_angle", [0.2, math.pi / 4, 2.0, 40.0])
def test_max_angle_holds_and_leaves_smaller_angles_alone(retraction, max_angle, impl):
    x, u = rows(200, 16, grad=False), rows(200, 16, grad=False) * torch.logspace(-2, 2, 200)[:, None]
    options = {"retraction": retraction, "impl": impl}
    free, held = sphere_step(x, u, **options), sphere_step(x, u, max_angle=max_angle, **options)
    p = geometry.retraction_exponent(retraction)
    t = geometry.tangent(x, u).norm(dim=-1) / x.norm(dim=-1)
    theta = t if p == math.inf else p * torch.atan(t / p)
    below = theta < max_angle * (1 - 1e-9)
    assert below.any()
    assert torch.equal(free[below], held[below])
    capped = torch.atan2(theta.clamp_max(max_angle).sin().abs(), theta.clamp_max(max_angle).cos())
    assert worst(geometry.angle(x, held), capped) <= SAME_64


@pytest.mark.parametrize("retraction", [r for r in RETRACTIONS if r != "exponential"])
def test_retraction_agrees_with_the_exponential_map_to_second_order(retraction):
    p = geometry.retraction_exponent(retraction)
    x, direction = rows(1, 8, grad=False), rows(1, 8, grad=False)
    v = geometry.tangent(x, direction)
    v = v / v.norm() * x.norm()
    for t in (1e-1, 1e-2):
        gap = t - geometry.angle(x, sphere_step(x, t * v, retraction=retraction))
        assert float(gap) == pytest.approx(t**3 / (3 * p**2), rel=t**2 / min(p, 1.0) ** 2 + 1e-6)


def test_implementations_agree():
    for retraction, max_angle, radius, dtype in itertools.product(
        RETRACTIONS, (None, 0.5), (None, 4.0), (torch.float64, torch.float32)
    ):
        x, u, g = (rows(33, 17, dtype=dtype, grad=False) for _ in range(3))
        options = {"retraction": retraction, "max_angle": max_angle, "radius": radius}
        results = [step_and_gradients(x, u, 0.8, g, impl=impl, **options) for impl in IMPLS]
        for one, *others in zip(*results, strict=True):
            for other in others:
                assert one.dtype == other.dtype
                assert worst(one, other) <= 4 * step_bound(dtype, 17), (retraction, max_angle, dtype)


@both
@pytest.mark.parametrize("power", [-40, -3, 5, 40])
def test_scaling_by_a_power_of_two_changes_no_bit(power, impl):
    x, u, g = (rows(7, 33, dtype=torch.float32, grad=False) for _ in range(3))
    y, grad_x, grad_u, grad_alpha = step_and_gradients(x, u, 0.8, g, impl=impl)
    s = 2.0**power
    scaled = step_and_gradients(x * s, u * s, 0.8, g, impl=impl)
    for one, other in zip((y * s, grad_x, grad_u, grad_alpha * s), scaled, strict=True):
        assert torch.equal(one, other)


@both
@pytest.mark.parametrize("size", [1e25, 1e-25])
@pytest.mark.parametrize("radius", [None, 3.0])
def test_a_row_far_out_of_range_changes_no_bit_of_the_others(radius, size, impl):
    """Where any row's squares leave the dtype every row is scaled; that must not show."""
    x, u, g = (rows(40, 33, dtype=torch.float32, grad=False) * 10 for _ in range(3))
    short = step_and_gradients(x, u, 0.8, g, radius=radius, impl=impl)
    far = torch.full((1, 33), size)
    x, u, g = torch.cat([x, far]), torch.cat([u, far.cumsum(-1)]), torch.cat([g, torch.zeros(1, 33)])
    scaled = step_and_gradients(x, u, 0.8, g, radius=radius, impl=impl)
    for one, other in zip(short[:3], scaled[:3], strict=True):
        assert torch.equal(one, other[:40])


# --- dtypes ---------------------------------------------------------------------------------------------------------


@both
@every_retraction
@pytest.mark.parametrize("dim", [1, 7, 64, 1024])
def test_float32_error(dim, retraction, impl):
    x, u = rows(50, dim, dtype=torch.float32, grad=False), rows(50, dim, dtype=torch.float32, grad=False)
    for max_angle, radius in itertools.product((None, 0.5), (None, math.sqrt(dim))):
        options = {"retraction": retraction, "max_angle": max_angle, "radius": radius}
        got = sphere_step(x, u, 0.8, impl=impl, **options).double()
        want = sphere_step(x.double(), u.double(), 0.8, impl="reference", **options)
        size = want.square().mean(-1, keepdim=True).sqrt()
        ratio = (0.8 * u.double().norm(dim=-1, keepdim=True) / x.double().norm(dim=-1, keepdim=True)).clamp_min(1.0)
        assert float(((got - want).abs() / (size * ratio)).max()) <= step_bound(torch.float32, dim)


@both
@every_retraction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_the_rounding_of_the_result(dtype, retraction, impl):
    check_half_precision(dtype, retraction, impl)


@both
@pytest.mark.parametrize("retraction", ["exponential", "cayley"])
def test_half_precision_at_fifty_radians(retraction, impl):
    check_half_precision(torch.bfloat16, retraction, impl, size=60.0, max_angle=None)


@both
def test_mixed_dtypes_follow_x(impl):
    for x_dtype, u_dtype in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), repeat=2):
        x, u = rows(3, 8, dtype=x_dtype), rows(3, 8, dtype=u_dtype)
        y = sphere_step(x, u, 0.5, impl=impl)
        assert y.dtype == x_dtype
        y.sum().backward()
        assert (x.grad.dtype, u.grad.dtype) == (x_dtype, u_dtype)


@both
@pytest.mark.parametrize("dim", [64, 1024])
@pytest.mark.parametrize("name", sorted(K1_ROWS))
def test_extreme_rows(name, dim, impl):
    check_extreme_rows(name, dim, impl)
