"""The step in use: compiled, exported, under autocast and checkpointing; and what users get wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from geonorm import UserError, sphere_step
from geonorm.ops import IMPLEMENTATIONS, which
from step_tools import IMPLS, TRITON, both, rows
from tolerances import EPS, TWO_RANKS, step_bound, worst

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
        assert worst(*(y.detach() for y in results)) <= step_bound(torch.float32, 12)
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


@pytest.mark.parametrize("impl", [*IMPLS, TRITON])
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


def test_two_ranks_match_one_process():
    built = [impl for impl in IMPLS if impl in ("autograd", "cpp")]
    script = Path(__file__).with_name("step_on_ranks.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), *built],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 2 * len(built)
    assert max(errors.values()) <= TWO_RANKS, errors


# --- what users get wrong -------------------------------------------------------------------------------------------

X = torch.ones(2, 4)
MISTAKES = {
    "shapes": (lambda: sphere_step(X, torch.ones(2, 5)), r"same shape, got \(2, 4\) and \(2, 5\)"),
    "broadcast": (lambda: sphere_step(X, torch.ones(1, 4)), r"same shape, got \(2, 4\) and \(1, 4\)"),
    "devices": (lambda: sphere_step(X, X.to("meta")), "same device, got cpu and meta"),
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
    "alpha int": (lambda: sphere_step(X, X, torch.ones(1).int()), "with one element, got torch.int32"),
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
