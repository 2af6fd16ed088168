"""The step against 50-digit arithmetic, against itself, and against the inputs that have broken others."""

from __future__ import annotations

import itertools
import math
import warnings

import mp_step
import pytest
import torch
from tolerances import EPS, ORACLE_64, RADIUS, REDUCED, SAME_64, spacing, step_bound, worst
from torch.autograd import gradcheck, gradgradcheck

from geonorm import UserError, geometry, sphere_step
from geonorm.ops import IMPLEMENTATIONS, which

IMPLS = sorted(IMPLEMENTATIONS)
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
@every_retraction
@pytest.mark.parametrize("radius", [None, 3.0])
@pytest.mark.parametrize("max_angle", [None, 0.3, 1.2])
def test_gradcheck(retraction, max_angle, radius, impl):
    x, u, alpha = rows(4, 5), rows(4, 5), torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        u[0] = 1.5 * x[0]
        u[1] *= 1e-3
        u[2] *= 5

    def step(*inputs):
        return sphere_step(*inputs, retraction=retraction, max_angle=max_angle, radius=radius, impl=impl)

    assert gradcheck(step, (x, u, alpha))


@every_retraction
@pytest.mark.parametrize("max_angle", [None, 0.3])
def test_gradgradcheck_of_the_reference(retraction, max_angle):
    x, u, alpha = rows(2, 4), rows(2, 4), torch.tensor([0.8], dtype=torch.float64, requires_grad=True)

    def step(*inputs):
        return sphere_step(*inputs, retraction=retraction, max_angle=max_angle, impl="reference")

    assert gradgradcheck(step, (x, u, alpha))


def test_second_derivative_of_the_analytic_backward_raises_instead_of_lying():
    x, u = rows(2, 4), rows(2, 4)
    (first,) = torch.autograd.grad(
        sphere_step(x, u, impl="autograd").square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


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


@every_retraction
def test_retraction_agrees_with_the_exponential_map_to_second_order(retraction):
    if retraction == "exponential":
        pytest.skip("it is the exponential map")
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
        for one, other in zip(*results, strict=True):
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
        assert float(((got - want).abs() / size).max()) <= step_bound(torch.float32, dim)


@both
@every_retraction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_the_rounding_of_the_result(dtype, retraction, impl):
    dim = 96
    x, u, g = (rows(50, dim, dtype=dtype, grad=False) for _ in range(3))
    options = {"retraction": retraction, "max_angle": 0.7, "radius": None}
    got = step_and_gradients(x, u, 0.8, g, impl=impl, **options)
    want = in_double(x, u, 0.8, g, **options)
    for name, value, exact in zip(("y", "grad_x", "grad_u"), got[:3], want[:3], strict=True):
        assert value.dtype == dtype
        error = (value.double() - exact).abs()
        # Where entries cancel, the float32 arithmetic inside shows; elsewhere half a spacing is the rounding.
        noise = step_bound(torch.float32, dim) * exact.square().mean(-1, keepdim=True).sqrt()
        assert bool((error <= spacing(exact, dtype) + noise).all()), name
        rounding = (exact.to(dtype).double() - exact).norm()
        assert float(error.norm()) <= 2 * float(rounding), name


@both
def test_mixed_dtypes_follow_x(impl):
    for x_dtype, u_dtype in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), repeat=2):
        x, u = rows(3, 8, dtype=x_dtype), rows(3, 8, dtype=u_dtype)
        y = sphere_step(x, u, 0.5, impl=impl)
        assert y.dtype == x_dtype
        y.sum().backward()
        assert (x.grad.dtype, u.grad.dtype) == (x_dtype, u_dtype)


K1_ROWS = {
    "fp16 300": (torch.float16, lambda n: torch.full((n,), 300.0)),
    "fp16 1e-4": (torch.float16, lambda n: torch.full((n,), 1e-4)),
    "fp32 1e20": (torch.float32, lambda n: torch.full((n,), 1e20)),
    "fp32 1e-30": (torch.float32, lambda n: torch.full((n,), 1e-30)),
    "fp32 3e38": (torch.float32, lambda n: torch.full((n,), 3e38).where(torch.arange(n) < 1, torch.tensor(1e30))),
    "fp32 subnormal": (torch.float32, lambda n: torch.full((n,), 1e-41)),
    "fp32 one 1e3 among 1e-3": (torch.float32, lambda n: torch.full((n,), 1e-3).index_fill(0, torch.tensor(5), 1e3)),
    "fp64 1e200": (torch.float64, lambda n: torch.full((n,), 1e200, dtype=torch.float64)),
}  # fmt: skip


@both
@pytest.mark.parametrize("dim", [64, 1024])
@pytest.mark.parametrize("name", sorted(K1_ROWS))
def test_extreme_rows(name, dim, impl):
    dtype, make = K1_ROWS[name]
    row = make(dim).to(dtype)
    if name == "fp32 3e38" and dim == 1024:
        pytest.skip("its length is no float32")
    sign = torch.where(torch.arange(dim) % 3 == 0, -1.0, 1.0).to(dtype)
    x, u = torch.stack([row, row * sign]), torch.stack([row * sign, row.flip(0) * sign])
    g = rows(2, dim, dtype=dtype, grad=False)
    got = step_and_gradients(x, u, 0.5, g, impl=impl)
    scale = x.double().abs().amax()
    # In float64 the same numbers, brought to about 1 by an exact factor, are no longer extreme.
    factor = torch.exp2(-torch.floor(torch.log2(scale)))
    y, grad_x, grad_u, grad_alpha = in_double(x.double() * factor, u.double() * factor, 0.5, g)
    want = (y / factor, grad_x, grad_u, grad_alpha / factor)
    eps = max(EPS[dtype], EPS[torch.float32]) if dtype != torch.float64 else EPS[dtype]
    for value, exact in zip(got[:3], want[:3], strict=True):
        assert bool(value.isfinite().all())
        size = exact.abs().amax(-1, keepdim=True)
        bound = 4 * eps * math.sqrt(dim) * size
        if name == "fp32 subnormal":
            bound = bound + spacing(exact, dtype)
        elif dtype == torch.float16:
            bound = bound + spacing(exact, dtype)
        assert bool(((value.double() - exact).abs() <= bound).all())
    exact = float(want[3])
    if abs(exact) < torch.finfo(torch.float32).max:
        absolute = float((g.double().norm(dim=-1) * u.double().norm(dim=-1)).sum())
        tiny = torch.finfo(torch.float32).tiny
        assert abs(float(got[3]) - exact) <= 4 * max(eps if dtype != torch.float16 else 0, 1e-16) * math.sqrt(
            dim
        ) * absolute + (step_bound(torch.float32, dim) * absolute if dtype == torch.float16 else 0) + tiny * dim


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
    x, u = rows(5, 12, grad=False) * torch.tensor([[1e-150], [1e-3], [1.0], [1e3], [1e150]]), rows(5, 12, grad=False)
    u = u * x.norm(dim=-1, keepdim=True)
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
            assert worst(y, x) <= 2 * EPS[dtype]


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
        for one, other in zip((y, *grads), want, strict=False):
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
        y = sphere_step(x, u, 0.5, max_angle=0.5, radius=4.0)
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


# --- compile, export, autocast, checkpointing -----------------------------------------------------------------------


def compiled(x, u, alpha):
    return sphere_step(x, u, alpha, max_angle=0.7, radius=3.0) + sphere_step(x, u, 0.3, retraction="cayley")


def test_compiled_equals_eager_with_transposed_inputs_and_any_batch():
    torch._dynamo.reset()
    step = torch.compile(compiled, fullgraph=True, dynamic=True)
    for batch in (4, 9):
        leaves, results = [], []
        g = torch.randn(12, batch).t()
        base = [torch.randn(12, batch) for _ in range(2)]
        base[0][:, 1] = 0
        for function in (compiled, step):
            x, u = (value.clone().t().requires_grad_() for value in base)
            alpha = torch.tensor([0.6], requires_grad=True)
            assert not x.is_contiguous()
            y = function(x, u, alpha)
            y.backward(g)
            leaves.append((x, u, alpha))
            results.append(y)
        assert worst(*results) <= step_bound(torch.float32, 12)
        for eager, other in zip(*leaves, strict=True):
            assert worst(other.grad, eager.grad) <= 4 * step_bound(torch.float32, 12)


def test_export_with_a_dynamic_batch():
    class Step(torch.nn.Module):
        def forward(self, x, u):
            return sphere_step(x, u, 0.7, max_angle=0.6)

    batch = torch.export.Dim("batch", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Step(), (torch.randn(3, 8), torch.randn(3, 8)), dynamic_shapes=({0: batch}, {0: batch})
        ).module()
    for rows_now in (1, 5):
        x, u = torch.randn(rows_now, 8), torch.randn(rows_now, 8)
        assert worst(program(x, u), Step()(x, u)) <= step_bound(torch.float32, 8)


@both
def test_dropout_autocast_and_checkpointing_change_nothing(impl):
    first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    tokens = torch.randn(4, 6, 16)

    def block(h, layer):
        update = torch.nn.functional.dropout(layer(h), 0.1)
        return sphere_step(h, update, 0.8, max_angle=0.7, impl=impl)

    def run(checkpointing):
        torch.manual_seed(7)
        for layer in (first, second):
            layer.zero_grad()
        h = tokens.clone().requires_grad_()
        start = h
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in (first, second):
                if checkpointing:
                    h = torch.utils.checkpoint.checkpoint(block, h, layer, use_reentrant=False)
                else:
                    h = block(h, layer)
            loss = h.float().square().mul(torch.arange(16.0)).mean()
        loss.backward()
        return [loss.detach(), start.grad, *(p.grad.clone() for layer in (first, second) for p in layer.parameters())]

    plain, saved = run(False), run(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, saved, strict=True))
    assert all(bool(value.isfinite().all()) and bool(value.any()) for value in plain)


# --- what users get wrong -------------------------------------------------------------------------------------------

X = torch.ones(2, 4)
MISTAKES = {
    "shapes": (lambda: sphere_step(X, torch.ones(2, 5)), r"same shape, got \(2, 4\) and \(2, 5\)"),
    "broadcast": (lambda: sphere_step(X, torch.ones(1, 4)), r"same shape, got \(2, 4\) and \(1, 4\)"),
    "scalar": (lambda: sphere_step(torch.tensor(1.0), torch.tensor(1.0)), "at least one axis"),
    "int x": (lambda: sphere_step(X.int(), X), r"`x` must be floating point.*int32.*\.float\(\)"),
    "int u": (lambda: sphere_step(X, X.long()), r"`u` must be floating point.*int64"),
    "complex": (lambda: sphere_step(X, X.to(torch.complex64)), "`u` must be floating point.*complex64"),
    "8 bits": (lambda: sphere_step(X.to(torch.float8_e4m3fn), X), "`x` must be floating point.*float8"),
    "list": (lambda: sphere_step([1.0], X), "`x` must be a torch.Tensor, got list"),
    "alpha -1": (lambda: sphere_step(X, X, -1.0), r"`alpha` must be positive, got -1\.0"),
    "alpha 0": (lambda: sphere_step(X, X, 0), "`alpha` must be positive, got 0"),
    "alpha nan": (lambda: sphere_step(X, X, math.nan), "`alpha` must be positive, got nan"),
    "alpha inf": (lambda: sphere_step(X, X, math.inf), "`alpha` must be positive, got inf"),
    "alpha text": (lambda: sphere_step(X, X, "1"), "`alpha` must be a positive number, got '1'"),
    "alpha true": (lambda: sphere_step(X, X, True), "`alpha` must be a positive number, got True"),
    "alpha vector": (lambda: sphere_step(X, X, torch.ones(2)), r"one element, got torch.float32 of shape \(2,\)"),
    "alpha int": (lambda: sphere_step(X, X, torch.ones(1).int()), "floating-point tensor with one element, got torch.int32"),
    "retraction": (lambda: sphere_step(X, X, retraction="cayly"), "unknown retraction 'cayly'; did you mean 'cayley'"),
    "p 0": (lambda: sphere_step(X, X, retraction=0), "`retraction` must be positive, got 0"),
    "p nan": (lambda: sphere_step(X, X, retraction=math.nan), "`retraction` must be positive, got nan"),
    "p list": (lambda: sphere_step(X, X, retraction=[2]), "`retraction` must be a positive number"),
    "p huge": (lambda: sphere_step(X, X, retraction=1e200), r"must lie in 1e-06\.\.1e\+06, got 1e\+200"),
    "p minute": (lambda: sphere_step(X, X, retraction=1e-200), r"must lie in 1e-06\.\.1e\+06, got 1e-200"),
    "impl": (lambda: sphere_step(X, X, impl="autgrad"), "unknown implementation 'autgrad'; did you mean 'autograd'"),
    "impl list": (lambda: sphere_step(X, X, impl=["auto"]), "unknown implementation"),
    "max_angle 0": (lambda: sphere_step(X, X, max_angle=0), "`max_angle` must be positive, got 0"),
    "max_angle text": (lambda: sphere_step(X, X, max_angle="pi"), "`max_angle` must be a positive number, got 'pi'"),
    "max_angle nan": (lambda: sphere_step(X, X, max_angle=math.nan), "`max_angle` must be positive, got nan"),
    "radius 0": (lambda: sphere_step(X, X, radius=0), "`radius` must be positive, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_mistakes_are_named(name):
    call, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize("limit", [1e-30, 1e19, 1e30, 1e200])
def test_limits_far_outside_the_dtype_are_no_crash(limit, impl):
    for retraction in ("exponential", "projection", 3.0):
        x, u = rows(3, 8, dtype=torch.float32), rows(3, 8, dtype=torch.float32)
        y = sphere_step(x, u, retraction=retraction, max_angle=limit, impl=impl)
        y.sum().backward()
        assert bool(x.grad.isfinite().all() & u.grad.isfinite().all())
        free = sphere_step(x, u, retraction=retraction, impl=impl)
        assert worst(y.detach(), (x if limit < 1 else free).detach()) <= 2 * EPS[torch.float32]


def test_implementation_names():
    assert which(X) in IMPLEMENTATIONS
    assert [which(X, impl) for impl in IMPLS] == IMPLS
