"""Shared fixtures: one thread, a fixed seed, no cache of the user, reference rows from elsewhere."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

# One folder for all that libraries keep, gone with the session that made it; workers and processes of tests inherit it.
KEPT = "GEONORM_TEST_CACHE"
MADE = None if KEPT in os.environ else tempfile.mkdtemp(prefix="geonorm-tests-")
CACHE = Path(os.environ.setdefault(KEPT, str(MADE)))
for name, folder in {
    "XDG_CACHE_HOME": "xdg",
    "GEONORM_CACHE": "geonorm",
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}.items():
    os.environ[name] = str(CACHE / folder)
# Libraries that were told of a part of the cache prefer that to the whole.
for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "TRITON_HOME"):
    os.environ.pop(name, None)

# What auto takes must not depend on what was built on this machine before: the C++ kernels where the environment says
# GEONORM_TEST_CPP=1, else none. Tests of the kernels name them and build them either way.
WITH_CPP = os.environ.get("GEONORM_TEST_CPP") == "1"
if WITH_CPP:
    os.environ.pop("GEONORM_CPP", None)
else:
    os.environ["GEONORM_CPP"] = "0"

# Read when triton is first imported, which any test may cause: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED_ORACLE = Path(__file__).resolve().parents[2] / "shared" / "oracle" / "sphere_step.json"


def pytest_configure() -> None:
    if WITH_CPP:
        importlib.import_module("geonorm.ops").build_cpu()


def pytest_unconfigure() -> None:
    if MADE is not None:
        shutil.rmtree(MADE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_for_a_lowered_processor(monkeypatch) -> None:
    """With the capability lowered by hand torch 2.13's compiled CPU code is wrong, so eager tests alone run there."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.skip("compiled code and ATEN_CPU_CAPABILITY"))


@pytest.fixture
def shared_oracle() -> list[dict]:
    """Rows of the step and its gradients from 60-digit arithmetic, kept outside the repository."""
    if not SHARED_ORACLE.is_file():
        pytest.skip("the shared table of reference rows is not beside this repository; the own table covers it")
    return json.loads(SHARED_ORACLE.read_text())["cases"]


@pytest.fixture
def nan_in_empty_buffers():
    """What torch hands out uninitialised holds NaN, so an entry that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def bfloat16_is_rounded(monkeypatch):
    """The interpreter of triton 3.9 cuts bfloat16 off where a GPU rounds to nearest, which would double every error."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    theirs = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source.name, target.name) == ("fp32", "bf16"):
            return torch.tensor(values).bfloat16().view(torch.uint16).numpy().reshape(values.shape)
        return theirs(values, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def walk(request, monkeypatch):
    """Size of the blocks in which the kernels walk a row; None for one pass over it."""
    if request.param:
        import triton_tools

        triton_tools.walk_blocks_of(request.param, monkeypatch)
    return request.param


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """A reported run: five placements, three rates, four seeds; some diverged, one failed, metrics cut off or gone."""
    from geonorm.report import write_report
    from report_runs import build_results, write_run

    folder = tmp_path_factory.mktemp("full")
    results = build_results(diverged=[("post", 0.00566, 0), ("deepnorm", None, None)], failed=[("sandwich", 0.004, 2)])
    write_run(folder, results)
    # A killed trial leaves half a line, and a trial may have lost its metrics.
    metrics = folder / "trials" / "geonorm-decay=sqrt-lr0.004-seed1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind":"train","step":510,"lo')
    (folder / "trials" / "pre-lr0.004-seed2" / "metrics.jsonl").unlink()
    path = write_report(folder)
    return folder, results, path.read_text(encoding="utf-8")
