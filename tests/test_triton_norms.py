"""Add and RMSNorm in one kernel, against the composition of torch's functions in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from benchmarks.norms import add_rms_norm, scaled_add_rms_norm

import step_tools
from geonorm import UserError
from tolerances import EPS, REDUCED, spacing, step_bound, worst
from triton_tools import DEVICE, as_on_a_gpu, walks

pytestmark = as_on_a_gpu
UPDATES = ["pre", 1.0, 2.2134]
every_update = pytest.mark.parametrize("update", UPDATES, ids=["pre", "post", "deepnorm"])


def rows(*shape, dtype=torch.float32):
    return step_tools.rows(*shape, dtype=dtype, grad=False).to(DEVICE)


def run(update, x, u, weight, g, g_sum, impl, wants=(True, True, True), **options):
    """Outputs, and gradients of <g, norm> + <g_sum, sum> by x, u and the gain."""
    leaves = [value.detach().clone().requires_grad_(want) for value, want in zip((x, u, weight), wants, strict=True)]
    if update == "pre":
        outputs = add_rms_norm(*leaves, impl=impl, **options)
        incoming = (g_sum, g)
    else:
        outputs, incoming = (scaled_add_rms_norm(*leaves, alpha=update, impl=impl, **options),), (g,)
    torch.autograd.backward(outputs, incoming)
    return [*(value.detach() for value in outputs), *(leaf.grad for leaf in leaves)]


def run_double(update, *tensors, **options):
    return run(update, *(value.double() for value in tensors), "reference", **options)


@walks(256)
@every_update
@pytest.mark.parametrize("dim", [1, 7, 65, 1000])
def test_values_and_gradients(dim, update, walk):
    x, u, g, g_sum = (rows(9, dim) for _ in range(4))
    x[2], u[2] = 0, 0
    tensors = (x, u, rows(dim), g, g_sum)
    # A zero row of one number: its gradient is 1/sqrt(eps) times the incoming one, hence the relative bound of worst.
    for got, want in zip(run(update, *tensors, "triton"), run_double(update, *tensors), strict=True):
        assert got.dtype == torch.float32
        assert worst(got, want) <= step_bound(torch.float32, dim)


@every_update
def test_wide_rows(update):
    tensors = (*(rows(2, 20000) for _ in range(2)), rows(20000), rows(2, 20000), rows(2, 20000))
    for got, want in zip(run(update, *tensors, "triton"), run_double(update, *tensors), strict=True):
        assert worst(got, want) <= step_bound(torch.float32, 20000)


@every_update
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_the_rounding_of_the_result(dtype, update):
    tensors = tuple(rows(*shape, dtype=dtype) for shape in ((50, 96), (50, 96), (96,), (50, 96), (50, 96)))
    if update == "pre":
        # The sum is rounded once, as it is stored, and the norm is of what was stored.
        total = (tensors[0] + tensors[1]).double()
        tensors = (tensors[0], tensors[1], *tensors[2:])
        want = run("pre", total, total * 0, *(value.double() for value in tensors[2:]), "reference")
    else:
        want = run_double(update, *tensors)
    for value, exact in zip(run(update, *tensors, "triton"), want, strict=True):
        assert value.dtype == dtype
        error, noise = (value.double() - exact).abs(), step_bound(torch.float32, 96) * exact.abs().max()
        assert bool((error <= spacing(exact, dtype) + noise).all())
        assert float(error.norm()) <= 2 * float((exact.to(dtype).double() - exact).norm()) + float(noise)


@walks(64)
@pytest.mark.parametrize("size", [1e-30, 1e-4, 300.0, 1e20, 1e36])
def test_extreme_rows(size, walk):
    for update in UPDATES:
        x, u, weight, g = rows(3, 200) * size, rows(3, 200) * size, rows(200), rows(3, 200)
        for got, want in zip(
            run(update, x, u, weight, g, g, "triton"), run_double(update, x, u, weight, g, g), strict=True
        ):
            assert bool(got.isfinite().all())
            assert float((got - want).abs().max() / want.abs().max()) <= step_bound(torch.float32, 200)


def test_gradient_of_the_gain_over_many_half_precision_rows():
    x, u, g = (rows(65536, 8, dtype=torch.bfloat16) for _ in range(3))
    x, u = x.abs(), u.abs()
    weight = torch.ones(8, device=DEVICE, dtype=torch.bfloat16)
    tensors = (x, u, weight, x + g, g)
    got, want = run(1.0, *tensors, "triton")[-1].double(), run_double(1.0, *tensors)[-1]
    assert float(want.min()) > 1e4
    assert bool(((got - want).abs() <= REDUCED * want.abs()).all())


@every_update
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_every_combination_of_frozen_inputs(wants, update):
    tensors = (rows(5, 6), rows(5, 6), rows(6), rows(5, 6), rows(5, 6))
    full = run(update, *tensors, "triton")[-3:]
    for gradient, want, expected in zip(run(update, *tensors, "triton", wants)[-3:], wants, full, strict=True):
        assert torch.equal(gradient, expected) if want else gradient is None


def test_one_output_alone():
    x, u, weight = (value.requires_grad_() for value in (rows(3, 8), rows(3, 8), rows(8)))
    for index in (0, 1):
        got, want = (
            torch.autograd.grad(
                add_rms_norm(x, u, weight, impl=impl)[index].square().sum(), (x, u, weight), allow_unused=True
            )
            for impl in ("triton", "reference")
        )
        for one, other in zip(got, want, strict=True):
            assert worst(one, torch.zeros_like(one) if other is None else other) <= 1e-5


@every_update
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (7,), (2, 3, 5)])
def test_shapes_and_layouts(shape, update):
    tensors = (rows(*shape), rows(*shape), rows(shape[-1]), rows(*shape), rows(*shape))
    if len(shape) == 3:
        tensors = tuple(value.transpose(0, -1).contiguous().transpose(0, -1) for value in tensors)
    for got, want in zip(run(update, *tensors, "triton"), run_double(update, *tensors), strict=True):
        assert got.shape == want.shape
        assert worst(got, want) <= step_bound(torch.float32, max(shape[-1], 1))


def test_mixed_dtypes_follow_the_stream():
    for update in UPDATES:
        x, u, weight, g = rows(4, 8), rows(4, 8, dtype=torch.bfloat16), rows(8), rows(4, 8)
        *outputs, by_x, by_u, by_weight = run(update, x, u, weight, g, g, "triton")
        assert all(value.dtype == torch.float32 for value in (*outputs, by_x, by_weight))
        assert by_u.dtype == torch.bfloat16
        want = run_double(update, x, u, weight, g, g)
        assert worst(by_u, want[-2]) <= 2 * EPS[torch.bfloat16]
        for value, exact in zip((*outputs, by_x, by_weight), (*want[:-3], want[-3], want[-1]), strict=True):
            assert worst(value, exact) <= step_bound(torch.float32, 8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_registered(dynamic):
    x, u, weight = (value.requires_grad_() for value in (rows(4, 8), rows(4, 8), rows(8)))
    torch.library.opcheck(torch.ops.geonorm.add_rms_norm.default, (x, u, weight, 1e-6))
    for alpha in (1.0, 2.2):
        torch.library.opcheck(torch.ops.geonorm.scaled_add_rms_norm.default, (x, u, weight, alpha, 1e-6))

    def both(x, u, weight):
        total, normed = add_rms_norm(x, u, weight, impl="triton")
        return total + scaled_add_rms_norm(normed, u, weight, alpha=2.0, impl="triton")

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got, want = (torch.autograd.grad(f(x, u, weight).square().sum(), (x, u, weight)) for f in (compiled, both))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_mistakes_are_named():
    x, weight = rows(2, 4), rows(4)
    for call, message in (
        (lambda: add_rms_norm(x, x[:1], weight), "same shape"),
        (lambda: add_rms_norm(x, x, rows(5)), r"`weight` must be.*shape \(4,\), got torch.float32 of shape \(5,\)"),
        (lambda: add_rms_norm(x, x, [1.0]), "`weight` must be.*got list"),
        (lambda: add_rms_norm(x, x, weight, eps=0), "`eps` must be positive, got 0"),
        (lambda: scaled_add_rms_norm(x, x, weight, alpha=-1), "`alpha` must be positive, got -1"),
        (lambda: scaled_add_rms_norm(x, x, weight, impl="tritn"), "did you mean 'triton'"),
        (lambda: scaled_add_rms_norm(x.double(), x, weight, impl="triton"), "an input is float64"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
