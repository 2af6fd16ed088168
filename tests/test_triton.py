"""The Triton kernels against the reference in float64: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import step_tools
from geonorm import UserError, geometry, sphere_step
from geonorm.ops import availability, which
from step_tools import K1_ROWS, every_retraction, in_double, step_and_gradients
from tolerances import EPS, REDUCED, step_bound, worst
from triton_tools import DEVICE, as_on_a_gpu, launch, walk_blocks_of, walks

pytestmark = as_on_a_gpu


def rows(*shape, dtype=torch.float32):
    return step_tools.rows(*shape, dtype=dtype, grad=False).to(DEVICE)


def triton_step(x, u, alpha, g, **options):
    return step_and_gradients(x, u, alpha, g, impl="triton", **options)


def assert_close(got, want, dim, x, u):
    """Values within the bound of a step, gradients too; alpha's by the size of its terms."""
    for name, value, exact in zip(("y", "grad_x", "grad_u"), got, want, strict=False):
        assert worst(value, exact) <= step_bound(torch.float32, dim), name
    terms = float(u.double().abs().sum()) + 1
    assert abs(float(got[3]) - float(want[3])) <= step_bound(torch.float32, dim) * terms


# --- values and gradients -------------------------------------------------------------------------------------------


@walks(256)
@every_retraction
@pytest.mark.parametrize("dim", [1, 7, 65, 1000])
def test_values_and_gradients(dim, retraction, walk):
    every = (None, 0.5), (None, math.sqrt(dim))
    for max_angle, radius in zip(*every, strict=True) if walk else itertools.product(*every):
        x, u, g = (rows(5, dim) for _ in range(3))
        # Rows of one number that happens to be near zero make every quotient ill-conditioned.
        x = x.sign() * (x.abs() + 0.5)
        u[0], u[1], x[2] = 1.5 * x[0], 0, 0
        options = {"retraction": retraction, "max_angle": max_angle, "radius": radius}
        assert_close(triton_step(x, u, 0.8, g, **options), in_double(x, u, 0.8, g, **options), dim, x, u)


@pytest.mark.parametrize("dim", [20000, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("retraction", ["exponential", 3.0])
def test_wide_rows(retraction, dim):
    x, u, g = (rows(2, dim) for _ in range(3))
    options = {"retraction": retraction, "max_angle": 0.9, "radius": math.sqrt(dim)}
    assert dim > launch.FORWARD_LIMIT
    assert_close(triton_step(x, u, 0.8, g, **options), in_double(x, u, 0.8, g, **options), dim, x, u)


@pytest.mark.parametrize("retraction", ["exponential", "projection", "cayley", 1e-6, 0.3, 1.7, 40.0, 1e6])
@pytest.mark.parametrize("max_angle", [None, 1.0])
def test_every_size_of_angle(retraction, max_angle):
    t = torch.logspace(-20, 4, 500, dtype=torch.float64).float()
    x, u, g = torch.zeros(500, 2), torch.zeros(500, 2), torch.ones(500, 2)
    x[:, 0], u[:, 1], g[:, 1] = 1, t, 2
    x, u, g = x.to(DEVICE), u.to(DEVICE), g.to(DEVICE)
    options = {"retraction": retraction, "max_angle": max_angle}
    got, want = triton_step(x, u, 1.0, g, **options), in_double(x, u, 1.0, g, **options)
    # An angle is known to eps of itself, so its sine and cosine to eps times the angle; the gradients are made
    # of terms of the size of theta and of theta / t.
    p, wide = geometry.retraction_exponent(retraction), t.double().to(DEVICE)
    theta = wide if p == math.inf else p * torch.atan(wide / p)
    theta = theta if max_angle is None else theta.clamp_max(max_angle)
    noise = 32 * EPS[torch.float32] * theta.clamp_min(1.0)[:, None]
    sizes = (1.0, theta.clamp_min(1.0)[:, None], (theta / wide)[:, None])
    for value, exact, size in zip(got[:3], want[:3], sizes, strict=True):
        assert bool(((value - exact).abs() <= noise * size).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_retraction
def test_half_precision_error_is_the_rounding_of_the_result(dtype, retraction):
    step_tools.check_half_precision(dtype, retraction, "triton", DEVICE)


def test_half_precision_at_fifty_radians():
    step_tools.check_half_precision(torch.bfloat16, "exponential", "triton", DEVICE, size=60.0, max_angle=None)


@walks(256)
@pytest.mark.parametrize("name", sorted(name for name in K1_ROWS if "fp64" not in name))
def test_extreme_rows(name, walk):
    step_tools.check_extreme_rows(name, 1024, "triton", DEVICE)


def test_magnitudes_that_grow_along_a_row(monkeypatch):
    walk_blocks_of(16, monkeypatch)
    grow = torch.logspace(-36, 36, 160).to(DEVICE)
    x, u, g = torch.stack([grow, grow.flip(0), grow * 0]), rows(3, 160) * grow, rows(3, 160)
    x[2, 80:], u[2] = 1e-30, 1e-30 * rows(160)
    got = triton_step(x, u, 0.5, g)
    # Row by row, brought to about 1, so that float64 has room.
    for i in range(3):
        factor = 2.0 ** -math.floor(math.log2(float(x[i].abs().max())))
        want = in_double(x[i : i + 1].double() * factor, u[i : i + 1].double() * factor, 0.5, g[i : i + 1])
        for value, exact in zip(got[:3], (want[0] / factor, *want[1:3]), strict=True):
            error = (value[i].double() - exact[0]).abs().max() / exact.abs().max()
            assert float(error) <= step_bound(torch.float32, 160)


@pytest.mark.parametrize("retraction", ["exponential", "projection", 3.0])
@pytest.mark.parametrize("limit", [1e-30, 1e19, 1e200])
def test_limits_far_outside_the_dtype(limit, retraction):
    x, u, g = (rows(3, 8) for _ in range(3))
    options = {"retraction": retraction, "max_angle": limit}
    got, want = triton_step(x, u, 1.0, g, **options), in_double(x, u, 1.0, g, **options)
    assert_close(got, want, 8, x, u)


# --- rows keep to themselves ----------------------------------------------------------------------------------------


@walks(16)
@pytest.mark.parametrize("radius", [None, 2.0])
def test_zero_rows_and_bad_numbers_stay_in_their_row(radius, walk):
    x, u, g = (rows(8, 40) for _ in range(3))
    clean = triton_step(x, u, 0.8, g, radius=radius)
    x[3], u[3] = 0, 1e30
    zero = triton_step(x, u, 0.8, g, radius=radius)
    assert all(bool(value.isfinite().all()) for value in zero)
    assert not any(value[3].any() for value in zero[:3])
    x[5, 7], u[6, 1], g[7, 2] = math.nan, math.inf, math.nan
    spoilt = triton_step(x, u, 0.8, g, radius=radius)
    for one, two, three in zip(clean[:3], zero[:3], spoilt[:3], strict=True):
        assert torch.equal(one[[0, 1, 2, 4]], two[[0, 1, 2, 4]])
        assert torch.equal(one[[0, 1, 2, 4]], three[[0, 1, 2, 4]])
    assert not any(bool(spoilt[1][i].isfinite().all()) for i in (5, 6, 7))


def test_half_of_a_batch_has_no_tangent_part():
    x, u, g = (rows(16, 64) for _ in range(3))
    u[::2] = -2 * x[::2]
    got, want = triton_step(x, u, 0.8, g), in_double(x, u, 0.8, g)
    assert_close(got, want, 64, x, u)
    assert worst(got[0][::2], x[::2]) <= EPS[torch.float32] * 8


@walks(256)
@pytest.mark.parametrize("dim", [64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_radius_holds_however_far_u_lies_along_the_row(dtype, dim, walk):
    step_tools.check_radius_along_the_row(lambda x, u: sphere_step(x, u, impl="triton"), dtype, dim, DEVICE)


@walks(16)
def test_gradients_where_u_lies_along_the_row(walk):
    x, v, g = (rows(20, 64) for _ in range(3))
    u = 100 * x + v
    got, want = triton_step(x, u, 0.8, g), in_double(x, u, 0.8, g)
    for value, exact in zip(got[:3], want[:3], strict=True):
        assert worst(value, exact) <= 100 * step_bound(torch.float32, 64)


# --- shapes, layouts, what gets a gradient --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (1,), (7,), (3, 1), (3, 7), (2, 3, 4, 5), (2, 0, 5), (4100, 3)])
def test_shapes(shape):
    x, u, g = (rows(*shape) for _ in range(3))
    x = x.sign() * (x.abs() + 0.5)
    got, want = triton_step(x, u, 0.8, g), in_double(x, u, 0.8, g)
    assert all(value.shape == torch.Size(shape) and value.is_contiguous() for value in got[:3])
    assert_close(got, want, max(shape[-1], 1), x, u)


def layouts(value):
    """The same numbers in layouts that are not contiguous."""
    yield "every second column", torch.stack([value, value], -1)[..., 0]
    yield "transposed", value.mT.contiguous().mT
    yield "part of wider rows", torch.cat([value, value], -1)[..., : value.shape[-1]]
    yield "every second row", torch.stack([value, value], 1).flatten(0, 1)[::2]


@walks(16)
def test_layouts(walk):
    x, u, g = (rows(6, 10) for _ in range(3))
    want = triton_step(x, u, 0.8, g)
    every = (layouts(x), layouts(u), layouts(g))
    for (name, a), (_, b), (_, c) in zip(*every, strict=True) if walk else itertools.product(*every):
        leaf_x, leaf_u = a.detach().requires_grad_(), b.detach().requires_grad_()
        y = sphere_step(leaf_x, leaf_u, torch.tensor([0.8], device=DEVICE), impl="triton")
        for one, other in zip((y.detach(), *torch.autograd.grad(y, (leaf_x, leaf_u), c)), want, strict=False):
            assert torch.equal(one, other), name
    expanded = torch.ones(1, 1, device=DEVICE).expand(6, 10)
    got, want = triton_step(x, u, 0.8, expanded), triton_step(x, u, 0.8, torch.ones(6, 10, device=DEVICE))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3)), ids=str)
def test_every_combination_of_frozen_inputs(wants):
    x, u, g = (rows(3, 6) for _ in range(3))
    full = triton_step(x, u, 0.8, g)[1:]
    alpha = torch.tensor([0.8], device=DEVICE)
    leaves = [value.clone().requires_grad_(want) for value, want in zip((x, u, alpha), wants, strict=True)]
    y = sphere_step(*leaves, impl="triton")
    assert y.requires_grad == any(wants)
    if any(wants):
        y.backward(g)
    for leaf, want, gradient in zip(leaves, wants, full, strict=True):
        assert torch.equal(leaf.grad, gradient) if want else leaf.grad is None


def test_mixed_dtypes_follow_x():
    for x_dtype, u_dtype in itertools.product((torch.float16, torch.bfloat16, torch.float32), repeat=2):
        x, u = rows(3, 8, dtype=x_dtype).requires_grad_(), rows(3, 8, dtype=u_dtype).requires_grad_()
        y = sphere_step(x, u, 0.5, impl="triton")
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, u.grad.dtype) == (x_dtype, x_dtype, u_dtype)
        assert worst(y, sphere_step(x.double(), u.double(), 0.5)) <= 4 * EPS[x_dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_gradient_of_alpha_has_its_shape_and_dtype(shape, dtype):
    x, u = rows(3, 6), rows(3, 6)
    alpha = torch.full(shape, 0.5, dtype=dtype, requires_grad=True)
    sphere_step(x, u, alpha, impl="triton").sum().backward()
    assert (alpha.grad.shape, alpha.grad.dtype) == (alpha.shape, dtype)


def test_gradient_of_alpha_over_many_half_precision_rows():
    x, u = rows(65536, 16, dtype=torch.bfloat16), rows(65536, 16, dtype=torch.bfloat16)
    got, want = triton_step(x, u, 0.5, u)[3], in_double(x, u, 0.5, u)[3]
    assert float(want) > 1e4
    assert float((got.double() - want).abs()) <= REDUCED * float(want)
    assert float((got.double() - want).abs()) <= 1e-4 * float(want)


def test_inputs_are_not_written_to():
    x, u, g = (rows(3, 6) for _ in range(3))
    copies = [value.clone() for value in (x, u, g)]
    triton_step(x, u, 0.8, g)
    assert all(torch.equal(value, copy) for value, copy in zip((x, u, g), copies, strict=True))


def test_double_precision_is_refused(monkeypatch):
    monkeypatch.setenv("GEONORM_CPP", "0")
    x = rows(2, 4, dtype=torch.float64)
    for one, other in ((x, x), (x.float(), x), (x, x.float())):
        with pytest.raises(UserError, match="float64; leave impl='auto'"):
            sphere_step(one, other, impl="triton")
    assert which(x) == "autograd"


def test_choice(monkeypatch):
    monkeypatch.setenv("GEONORM_CPP", "0")
    x = rows(2, 4)
    assert which(x, "triton") == "triton"
    assert which(x) == ("triton" if DEVICE == "cuda" else "autograd")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"needs a GPU and the tensor is on cpu.*TRITON_INTERPRET=1"):
        which(x.cpu(), "triton")
    monkeypatch.setattr(availability, "TRITON_INSTALLED", False)
    with pytest.raises(UserError, match="not installed; `pip install triton`"):
        which(x, "triton")
    assert which(x) == "autograd"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: 4.3 GB a tensor, 32,769 programs")
def test_last_row_beyond_32_bit_offsets():
    x = torch.zeros(2**23 + 16, 256, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = 1
    u = torch.linspace(-1, 2, 256, device=DEVICE).to(x).expand_as(x)
    y = sphere_step(x, u, 0.5, impl="triton")
    assert not y[:-1].any()
    assert worst(y[-1:], sphere_step(x[-1:].double(), u[-1:].double(), 0.5)) <= EPS[torch.bfloat16]


def test_opcheck_where_the_kernels_run():
    x, u = rows(5, 7).requires_grad_(), rows(5, 7, dtype=torch.bfloat16).requires_grad_()
    alpha = torch.tensor([0.5], requires_grad=True, device=DEVICE)
    arguments = (x, u, alpha, 1.0, 3.0, 0.4, None)
    results = torch.library.opcheck(torch.ops.geonorm.sphere_step_triton.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_kernels_compile_for_gpus(tmp_path):
    """The interpreter accepts what a compiler does not; compiling needs no GPU. Row offsets must have 64 bits."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, str(script)], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert len(compiled) == 23
    assert {entry["kernel"] for entry in compiled} == {"step_forward", "step_backward", "norm_forward", "norm_backward"}
    assert all(entry["binary_bytes"] > 1000 for entry in compiled)
    assert all(entry["row_offsets"] == ["i64"] for entry in compiled)
