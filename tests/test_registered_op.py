"""The step as a registered operation: what torch checks of one, compiled, exported, and who chooses it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch.library import opcheck

from geonorm import UserError, sphere_step
from geonorm.ops import IMPLEMENTATIONS, availability, which
from step_tools import CPP, TRITON, rows
from tolerances import worst

IMPLS = [TRITON, CPP]
registered = pytest.mark.parametrize("impl", IMPLS)


def leaf(*shape, dtype=torch.float32, transposed=False):
    value = rows(*(reversed(shape) if transposed else shape), dtype=dtype, grad=False)
    return (value.t() if transposed else value).requires_grad_()


def operations(impl):
    """Forward and backward as torch knows them."""
    return [getattr(torch.ops.geonorm, f"sphere_step_{impl}{end}").default for end in ("", "_backward")]


# --- what torch checks ----------------------------------------------------------------------------------------------


@registered
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype, transposed, impl):
    if impl == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels have no float64")
    step = operations(impl)[0]
    for alpha, (p, limit, radius) in itertools.product(
        (None, torch.tensor([0.5], requires_grad=True)), ((math.inf, None, None), (1.0, 0.4, 2.0))
    ):
        inputs = (leaf(5, 7, dtype=dtype, transposed=transposed), leaf(5, 7, dtype=dtype, transposed=transposed))
        assert set(opcheck(step, (*inputs, alpha, 0.7, p, limit, radius)).values()) == {"SUCCESS"}


@registered
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_opcheck_of_the_backward(needs, impl):
    g, x, u = (rows(7, 5, dtype=torch.float32, grad=False).t() for _ in range(3))
    arguments = (g, x, u, torch.tensor(0.5), 1.0, 3.0, 0.4, 2.0, list(needs))
    results = opcheck(operations(impl)[1], arguments)
    assert set(results.values()) == {"SUCCESS"}


@registered
def test_only_x_and_u_are_kept_for_the_backward(impl):
    x, u, alpha, kept = leaf(16, 32), leaf(16, 32), torch.tensor([0.5], requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        sphere_step(x, u, 0.5, max_angle=0.5, radius=4.0, impl=impl)
        assert [value.data_ptr() for value in kept] == [x.data_ptr(), u.data_ptr()]
        sphere_step(x, u, alpha, max_angle=0.5, radius=4.0, impl=impl)
    assert [value.data_ptr() for value in kept[2:]] == [x.data_ptr(), u.data_ptr(), alpha.data_ptr()]


# --- compiled and exported ------------------------------------------------------------------------------------------


def neighbours(x, u, alpha, impl):
    """Two steps among other work, with an alpha of each kind."""
    y = sphere_step(x * 2, u, alpha, max_angle=0.7, radius=3.0, impl=impl)
    return torch.nn.functional.silu(y) + sphere_step(y, u, 0.3, retraction="cayley", impl=impl)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@registered
def test_one_graph_for_any_batch_and_transposed_inputs(impl, backend):
    torch._dynamo.reset()
    graphs = []

    def compile_and_count(graph, examples):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, examples)

    step = torch.compile(neighbours, fullgraph=True, dynamic=True, backend=compile_and_count)
    for batch in (4, 9):
        leaves = (leaf(batch, 12, transposed=True), leaf(batch, 12, transposed=True))
        assert not leaves[0].is_contiguous()
        alpha = torch.tensor([0.6], requires_grad=True)
        g = rows(12, batch, dtype=torch.float32, grad=False).t()
        results = []
        for function in (neighbours, step):
            y = function(*leaves, alpha, impl)
            results.append((y.detach(), *torch.autograd.grad(y, (*leaves, alpha), g)))
        for eager, other in zip(*results, strict=True):
            assert worst(other, eager) <= 1e-5
    assert len(graphs) == 1


@registered
def test_numbers_that_change_between_calls_compile(impl):
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, u, alpha: sphere_step(x, u, alpha, max_angle=2 * alpha, impl=impl),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    x, u = rows(3, 8, dtype=torch.float32, grad=False), rows(3, 8, dtype=torch.float32, grad=False)
    for alpha in (0.3, 0.5, 0.9):
        assert worst(step(x, u, alpha), sphere_step(x, u, alpha, max_angle=2 * alpha)) <= 1e-6


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_export_with_a_dynamic_batch(impl, tmp_path):
    class Step(torch.nn.Module):
        def forward(self, x, u):
            return sphere_step(x, u, 0.7, max_angle=0.6, impl=impl)

    batch = torch.export.Dim("batch", min=1, max=64)
    example = (torch.randn(3, 8), torch.randn(3, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Step(), example, dynamic_shapes=({0: batch}, {0: batch}))
        # The exponential map's p is infinite, which has to survive being written down.
        torch.export.save(program, tmp_path / "step.pt2")
        program = torch.export.load(tmp_path / "step.pt2").module()
    for rows_now in (1, 5):
        x, u = torch.randn(rows_now, 8), torch.randn(rows_now, 8)
        eager = Step()(x, u)
        assert worst(program(x, u), eager) <= (1e-6 if impl == "auto" else 0.0)


@pytest.mark.parametrize(("impl", "opaque"), [("auto", 0), pytest.param("cpp", 1, marks=CPP.marks)])
def test_auto_on_a_cpu_leaves_nothing_opaque_in_a_compiled_graph(impl, opaque):
    def nodes(impl):
        torch._dynamo.reset()
        seen = []

        def look(graph, _):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        x, u = torch.randn(3, 8), torch.randn(3, 8)
        torch.compile(lambda x, u: sphere_step(x, u, impl=impl), fullgraph=True, backend=look)(x, u)
        return [name for name in seen if "geonorm" in name]

    assert len(nodes(impl)) == opaque


# --- the choice -----------------------------------------------------------------------------------------------------


def test_which(monkeypatch):
    monkeypatch.setenv("GEONORM_CPP", "0")
    x = torch.ones(2, 4)
    assert which(x) == "autograd"
    assert which(x, "reference") == "reference"
    assert set(IMPLEMENTATIONS) == {"reference", "autograd", "triton", "cpp"}


def test_triton_that_cannot_run_is_named_with_the_remedy(monkeypatch):
    x = torch.ones(2, 4)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("GEONORM_CPP", "0")
    for installed, message in ((True, "needs a GPU and the tensor is on cpu"), (False, "is not installed; `pip inst")):
        monkeypatch.setattr(availability, "TRITON_INSTALLED", installed)
        for call in (lambda: which(x, "triton"), lambda: sphere_step(x, x, impl="triton")):
            with pytest.raises(UserError, match=f"impl='triton' cannot run here: .*{message}") as caught:
                call()
            assert "\n" not in str(caught.value)
            assert "leave impl='auto'" in str(caught.value)
        assert which(x) == "autograd"


def test_importing_and_stepping_on_a_cpu_imports_no_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import geonorm; x = torch.ones(2, 3);"
        "geonorm.sphere_step(x, x); geonorm.ops.which(x); assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not availability.TRITON_INSTALLED, reason="the package triton is not installed")
def test_asking_too_late_to_interpret_is_named():
    code = (
        "import os, torch, triton, geonorm; os.environ['TRITON_INTERPRET'] = '1'; x = torch.ones(2, 3)\n"
        "try: geonorm.sphere_step(x, x, impl='triton')\n"
        "except geonorm.UserError as error: print(error)"
    )
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "before Python starts" in done.stdout, done.stderr
