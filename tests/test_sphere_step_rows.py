"""Rows that have broken others: padding, vanishing tangents, NaN, odd shapes and layouts, frozen inputs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from geonorm import geometry, sphere_step
from step_tools import (
    both,
    check_radius_along_the_row,
    every_retraction,
    in_double,
    rows,
    step_and_gradients,
)
from tolerances import EPS, RADIUS, REDUCED, SAME_64, step_bound, worst

# --- rows keep to themselves ----------------------------------------------------------------------------------------


@both
@every_retraction
@pytest.mark.parametrize("radius", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_and_vanishing_tangents_leave_other_rows_bit_equal(dtype, radius, retraction, impl):
    x, u, g = (rows(8, 24, dtype=dtype, grad=False) for _ in range(3))
    u[::2] = x[::2]
    u[2] = 0
    x[3] = 0
    options = {"retraction": retraction, "max_angle": 0.6, "radius": radius, "impl": impl}
    y, grad_x, grad_u, grad_alpha = step_and_gradients(x, u, 0.8, g, **options)
    assert all(bool(value.isfinite().all()) for value in (y, grad_x, grad_u, grad_alpha))
    for value in (y, grad_x, grad_u):
        assert not value[3].any()
    keep = [i for i in range(8) if i != 3]
    others = step_and_gradients(x[keep], u[keep], 0.8, g[keep], **options)
    for one, other in zip((y, grad_x, grad_u), others, strict=False):
        assert torch.equal(one[keep], other)
    if radius is None:
        assert worst(y[[0, 2, 4, 6]], x[[0, 2, 4, 6]]) <= EPS[dtype]


@both
@pytest.mark.parametrize("radius", [None, 2.0])
def test_zero_row_with_a_huge_update(radius, impl):
    x, u, g = (rows(4, 8, dtype=torch.float32, grad=False) for _ in range(3))
    x[1], u[1] = 0, 1e30
    y, grad_x, grad_u, grad_alpha = step_and_gradients(x, u, 0.8, g, radius=radius, impl=impl)
    assert all(bool(value.isfinite().all()) for value in (y, grad_x, grad_u, grad_alpha))
    assert not any(value[1].any() for value in (y, grad_x, grad_u))


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "u", "g"])
def test_a_bad_number_stays_in_its_row(where, bad, impl):
    x, u, g = (rows(6, 40, dtype=torch.float32, grad=False) for _ in range(3))
    clean = step_and_gradients(x, u, 0.8, g, impl=impl)
    {"x": x, "u": u, "g": g}[where][4, 7] = bad
    spoilt = step_and_gradients(x, u, 0.8, g, impl=impl)
    keep = [0, 1, 2, 3, 5]
    for one, other in zip(clean[:3], spoilt[:3], strict=True):
        assert torch.equal(one[keep], other[keep])
    assert not bool(spoilt[1][4].isfinite().all())


@pytest.mark.parametrize("retraction", ["exponential", "projection", "cayley"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thousand_steps_stay_on_a_named_sphere(dtype, retraction):
    radius = 8.0
    x = torch.nn.functional.normalize(torch.randn(64, 64), dim=-1).mul(radius).to(dtype)
    spread = {}
    for i in range(1, 1001):
        x = sphere_step(x, torch.randn(64, 64).to(dtype), retraction=retraction, radius=radius)
        if i in (10, 1000):
            spread[i] = (x.double().norm(dim=-1) / radius - 1).abs()
    assert float(spread[1000].max()) <= RADIUS[dtype]
    assert float(spread[1000].mean()) <= 1.5 * float(spread[10].mean())


@both
def test_radius_brings_any_row_to_its_sphere(impl):
    sizes = torch.tensor([[1e-200], [1e-3], [1.0], [1e3], [1e200]], dtype=torch.float64)
    x, u = rows(5, 12, grad=False) * sizes, rows(5, 12, grad=False) * sizes
    y = sphere_step(x, u, 0.5, radius=7.0, impl=impl)
    assert worst(y.norm(dim=-1), torch.full((5,), 7.0)) <= SAME_64
    same = sphere_step(x, u, 0.5, impl=impl)
    assert worst(geometry.angle(y, same), torch.zeros(5)) <= SAME_64


@both
@every_retraction
def test_updates_along_or_against_the_row_move_nothing(retraction, impl):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = rows(9, 31, dtype=dtype, grad=False)
        for u in (x, -x, 1.5 * x, -2 * x):
            y = sphere_step(x, u, 1.0, retraction=retraction, impl=impl)
            assert bool(y.isfinite().all())
            # v is what the rounding of u, at most twice as long as x, leaves.
            assert worst(y, x) <= 4 * EPS[dtype]


@both
@pytest.mark.parametrize("max_angle", [None, 0.3])
@pytest.mark.parametrize("dim", [64, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_radius_holds_however_far_u_lies_along_the_row(dtype, dim, max_angle, impl):
    check_radius_along_the_row(lambda x, u: sphere_step(x, u, max_angle=max_angle, impl=impl), dtype, dim)


@both
@pytest.mark.parametrize("times", [1e2, 1e4])
def test_gradients_where_u_lies_along_the_row(times, impl):
    x, v, g = (rows(20, 64, dtype=torch.float32, grad=False) for _ in range(3))
    u = (times * x.double() + v.double()).float()
    got, want = step_and_gradients(x, u, 0.8, g, impl=impl), in_double(x, u, 0.8, g)
    # Relative to |u| / |x|, by which the rounding of u counts in v and the gradient by u in that by x.
    for value, exact in zip(got[:3], want[:3], strict=True):
        assert worst(value, exact) <= times * step_bound(torch.float32, 64)


# --- shapes, layouts, what gets a gradient --------------------------------------------------------------------------


@both
@pytest.mark.parametrize("shape", [
    (0, 64), (3, 0), (1,), (7,), (3, 1), (3, 7), (3, 65), (3, 1000), (2, 20000), (2, 3, 4, 5), (2, 0, 5),
])  # fmt: skip
def test_shapes(shape, impl):
    x, u, g = (rows(*shape, dtype=torch.float32, grad=False) for _ in range(3))
    got = step_and_gradients(x, u, 0.8, g, impl=impl)
    want = in_double(x, u, 0.8, g)
    dim = max(shape[-1], 1)
    for value, exact in zip(got[:3], want[:3], strict=True):
        assert value.shape == torch.Size(shape)
        assert worst(value, exact) <= step_bound(torch.float32, dim)
    assert bool(got[3].isfinite().all())
    assert worst(got[3] / dim, want[3] / dim) <= step_bound(torch.float32, dim)


@both
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3)), ids=str)
def test_every_combination_of_frozen_inputs(wants, impl):
    x, u, g = (rows(3, 6, grad=False) for _ in range(3))
    alpha = torch.tensor([0.8], dtype=torch.float64)
    full = step_and_gradients(x, u, 0.8, g, impl=impl)[1:]
    leaves = [value.clone().requires_grad_(want) for value, want in zip((x, u, alpha), wants, strict=True)]
    y = sphere_step(*leaves, impl=impl)
    assert y.requires_grad == any(wants)
    if any(wants):
        y.backward(g)
    for leaf, want, gradient in zip(leaves, wants, full, strict=True):
        if want:
            assert worst(leaf.grad, gradient) <= SAME_64
        else:
            assert leaf.grad is None


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_gradient_of_alpha_has_its_shape_and_dtype(shape, dtype, impl):
    x, u = rows(3, 6, dtype=torch.float32), rows(3, 6, dtype=torch.float32)
    alpha = torch.full(shape, 0.5, dtype=dtype, requires_grad=True)
    sphere_step(x, u, alpha, impl=impl).sum().backward()
    assert (alpha.grad.shape, alpha.grad.dtype) == (alpha.shape, dtype)


def layouts(value):
    """The same numbers in layouts that are not contiguous."""
    wide = torch.stack([value, value], -1)
    yield "every second column", wide[..., 0]
    yield "transposed", value.t().contiguous().t()
    yield "offset rows", torch.cat([value, value])[len(value) :]


@both
def test_layouts(impl):
    x, u, g = (rows(6, 10, grad=False) for _ in range(3))
    want = step_and_gradients(x, u, 0.8, g, impl=impl)
    for (name, a), (_, b), (_, c) in itertools.product(layouts(x), layouts(u), layouts(g)):
        leaf_x, leaf_u = a.detach().requires_grad_(), b.detach().requires_grad_()
        y = sphere_step(leaf_x, leaf_u, 0.8, impl=impl)
        grads = torch.autograd.grad(y, (leaf_x, leaf_u), c)
        for one, other in zip((y.detach(), *grads), want, strict=False):
            assert worst(one, other) <= SAME_64, name
    expanded = torch.ones(1, 1, dtype=torch.float64).expand(6, 10)
    for one, other in zip(
        step_and_gradients(x, u, 0.8, expanded, impl=impl),
        step_and_gradients(x, u, 0.8, torch.ones(6, 10, dtype=torch.float64), impl=impl),
        strict=True,
    ):
        assert worst(one, other) <= SAME_64


@both
def test_inputs_are_not_written_to(impl):
    x, u, g = (rows(3, 6, grad=False) for _ in range(3))
    copies = [value.clone() for value in (x, u, g)]
    step_and_gradients(x, u, 0.8, g, impl=impl)
    for value, copy in zip((x, u, g), copies, strict=True):
        assert torch.equal(value, copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_x_and_u_are_kept_for_the_backward(dtype):
    x, u, kept = rows(16, 32, dtype=dtype), rows(16, 32, dtype=dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        y = sphere_step(x, u, 0.5, max_angle=0.5, radius=4.0, impl="autograd")
    assert [value.data_ptr() for value in kept] == [x.data_ptr(), u.data_ptr()]
    assert [value.dtype for value in kept] == [dtype, dtype]
    assert type(y.grad_fn).__name__ == "_SphereStepBackward"


@both
def test_gradient_of_alpha_over_many_half_precision_rows(impl):
    x, u = rows(65536, 16, dtype=torch.bfloat16, grad=False), rows(65536, 16, dtype=torch.bfloat16, grad=False)
    got = step_and_gradients(x, u, 0.5, u, impl=impl)[3]
    want = in_double(x, u, 0.5, u)[3]
    assert float(want) > 1e4
    assert float((got.double() - want).abs()) <= REDUCED * float(want)
    assert float((got.double() - want).abs()) <= 1e-4 * float(want)
