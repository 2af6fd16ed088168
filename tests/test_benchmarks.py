"""Every benchmark runs at tiny sizes, and the claims that need no clock hold."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import common, gpu, kernels, memory, model, peers, step, training_step

from geonorm import UserError
from geonorm.ops import IMPLEMENTATIONS
from geonorm.placements import available

ROOT = Path(__file__).resolve().parents[1]


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def run(module, kind, folder, **options):
    result = module.run(kind(quick=True, out=folder, **options))
    name = module.__name__.rpartition(".")[2]
    written = json.loads((folder / f"{name}.json").read_text())
    assert written["command"].startswith(f"python -m benchmarks.{name}")
    assert {"torch", "geonorm", "processor", "cores", "threads"} <= set(written["machine"])
    assert written["seconds"] > 0
    assert (folder / f"{name}.md").read_text().startswith(f"# {name}\n")
    return result, written


def is_spread(value):
    low, high = value["quartiles"]
    return 0 < low <= high and 0 < value["median"] < math.inf


def test_step(tmp_path):
    _, result = run(step, step.StepSettings, tmp_path)
    timed = {(row["name"], row["dtype"]): row for row in result["rows"] if "ms" in row}
    skipped = {(row["name"], row["dtype"]): row["skipped"] for row in result["rows"] if "skipped" in row}
    for dtype in ("float32", "bfloat16"):
        for name in ("copy", "torch", *IMPLEMENTATIONS):
            assert ((name, dtype) in timed) != ((name, dtype) in skipped), (name, dtype)
        assert {("reference", dtype), ("autograd", dtype), ("torch", dtype), ("copy", dtype)} <= set(timed)
        over = timed["autograd", dtype]
        assert all(is_spread(over[key]) for key in ("ms", "forward_over_copy", "backward_over_copy", "over_torch_norm"))
    assert result["peak_copy_GB_s"] > 0
    assert result["left_out_for_time"] == []


def test_a_wrong_implementation_is_not_timed(tmp_path, monkeypatch):
    right = IMPLEMENTATIONS["autograd"]
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", lambda *arguments: 1.01 * right(*arguments))
    with pytest.raises(AssertionError, match="error"):
        step.run(step.StepSettings(quick=True, dtypes=("float32",)))


def test_a_new_implementation_shows_by_itself(tmp_path, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "new", IMPLEMENTATIONS["autograd"])
    result = step.run(step.StepSettings(quick=True, dtypes=("float32",)))
    assert any(row["name"] == "new" and "ms" in row for row in result["rows"])


def test_training_step(tmp_path):
    _, result = run(training_step, training_step.TrainingSettings, tmp_path)
    losses = result["losses_before"]
    assert set(losses) == {"stock", *available()}
    assert losses["stock"] == losses["pre"] != losses["geonorm"]
    rows = {(row["part"], row.get("placement")): row for row in result["rows"]}
    for part in ("forward + backward", "with AdamW"):
        for name in losses:
            assert is_spread(rows[part, name]["over_pre"])
            assert is_spread(rows[part, name]["over_products"])
    assert is_spread(rows["blocks, forward + backward", "geonorm"]["over_pre"])
    assert rows["with AdamW", "pre"]["over_pre"]["median"] == 1
    # Two layers with four projections for the attention and three for the MLP, and the head; each is a product forward
    # and two backward.
    assert result["num_products"] == 3 * (2 * 7 + 1)


def test_the_products_alone_are_those_of_the_model():
    shape = model.Shape(**model.SIZES["quick"])
    seen = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    products, attention, count = model.record_products(
        model.build("pre", shape, "cpu"), model.make_batch(shape, "cpu"), "fp32"
    )
    with Counting():
        products()
        assert len(seen) == count
        assert set(seen) <= model.PRODUCTS
        attention()
    # Once a layer, forward and backward.
    assert len(seen) - count == 2 * shape.layers


def test_bytes_kept_for_the_backward(tmp_path):
    _, result = run(memory, memory.MemorySettings, tmp_path)
    step_rows = {(row["name"], row["dtype"]): row for row in result["step"]}
    for (name, _), row in step_rows.items():
        if row["kind"] == "step" and name not in ("reference", "geoopt"):
            assert 0 <= row["bytes_a_row_beyond"] <= 64, name
    assert step_rows["reference", "float32"]["over_x_and_u"] > 2
    # Pre-Norm keeps the sum and one number a row in float32; in bfloat16 PyTorch's norm keeps more.
    assert {"autograd", "reference"} <= {name for name, _ in step_rows}
    blocks = {row["placement"]: row for row in result["blocks"]}
    assert set(blocks) == {"stock", *available()}
    assert blocks["stock"]["bytes_a_token"] == blocks["pre"]["bytes_a_token"]
    assert blocks["geonorm"]["over_pre"] < 1 < blocks["sandwich"]["over_pre"]


def test_saved_bytes_count_each_storage_once_and_no_parameters():
    weight = torch.ones(4, requires_grad=True)
    x = torch.ones(3, 4, requires_grad=True)
    with memory.saved_bytes(iter([weight])) as count:
        product = x * x
        (product * weight).sum()
        assert count() == x.nbytes + product.nbytes


def test_kernels(tmp_path):
    result, _ = run(kernels, kernels.KernelSettings, tmp_path)
    assert result["wrong"] == result["left_out_for_time"] == 0
    assert len(result["rows"]) == 3 * 4 * 2 + 3 + 3 * 2
    assert all(0 < row["error_over_allowed"] <= 1 for row in result["rows"])


def test_kernels_that_are_wrong_end_with_code_1(monkeypatch):
    right = kernels.sphere_step
    monkeypatch.setattr(
        kernels,
        "sphere_step",
        lambda *args, impl, **more: right(*args, impl=impl, **more) * (1 + 1e-3 * (impl != "reference")),
    )
    with pytest.raises(SystemExit):
        kernels.run(kernels.KernelSettings(quick=True))


@pytest.mark.parametrize("name", peers.CONTENDERS)
def test_a_peer(name, capsys):
    for package in ("x_transformers", "nGPT_pytorch"):
        if package.replace("_", "-") == name:
            pytest.importorskip(package)
    figures = peers.run(peers.PeerSettings(quick=True, worker=name))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert len(figures["seconds"]) == 3
    assert figures["parameters"] > 60_000
    assert math.isfinite(figures["first_loss"])
    assert figures["peak_MiB"] >= 0


def test_x_transformers_has_the_parameters_of_the_stock_llama():
    pytest.importorskip("x_transformers")
    shape = model.Shape(**model.SIZES["quick"])
    counts = [
        sum(parameter.numel() for parameter in peers.CONTENDERS[name](shape, "cpu")[0].parameters())
        for name in ("transformers", "x-transformers")
    ]
    assert counts[0] == counts[1] == 90_432


def test_peers_in_processes_of_their_own(tmp_path):
    _, result = run(peers, peers.PeerSettings, tmp_path, contenders=("transformers",))
    (row,) = result["rows"]
    assert row["over_transformers"]["median"] == 1
    assert row["peak_MiB"] > 0


def test_the_gpu_script_says_in_one_line_that_there_is_no_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = command("benchmarks.gpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: there is no GPU here")


def test_the_gpu_script_keeps_what_worked_when_a_part_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"no_such_part": 0.1, "step": 0.9})
    with pytest.raises(SystemExit):
        gpu.run(gpu.GpuSettings(device="cpu", quick=True, out=tmp_path))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert "No module named" in parts["no_such_part"]["failed"]
    assert any("ms" in row for row in parts["step"]["rows"])


@pytest.mark.slow
def test_the_gpu_script_on_a_cpu(tmp_path):
    done = command("benchmarks.gpu", "--device", "cpu", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert list(result["parts"]) == ["kernels", "step", "training_step", "memory", "peers"]
    assert all("failed" not in part and part["seconds"] > 0 for part in result["parts"].values())


def test_turns_alternate_and_end_when_the_time_is_over():
    order = []
    turns = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert common.take_turns(turns, 2, warm_up=0) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["a", "b", "b", "a"]
    order.clear()
    common.take_turns(turns, 50, warm_up=1, budget=common.Budget(0.0))
    assert len(order) == 2 * (1 + common.FEWEST_ROUNDS)


def test_medians_quartiles_ratios():
    assert common.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "rounds": 5}
    assert common.ratio([2.0, 6.0, 9.0], [1.0, 2.0, 9.0]) == {"median": 2.0, "quartiles": [1.5, 2.5], "rounds": 3}


def test_mistakes_are_one_line():
    for call, message in (
        (lambda: step.run(step.StepSettings(device="gpu", quick=True)), "`device` must be cpu or cuda"),
        (lambda: step.run(step.StepSettings(quick=True, dtypes=("fp32",))), "`dtypes` must be of float32"),
        (
            lambda: peers.run(peers.PeerSettings(quick=True, contenders=("llama",))),
            "`contenders` must be of transformers",
        ),
        (lambda: model.shape_of(model.ModelSettings(width=100)), "multiple of 64"),
        (
            lambda: training_step.run(training_step.TrainingSettings(quick=True, placements=("geonorm",))),
            "must hold 'pre'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            call()
