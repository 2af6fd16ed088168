"""The C++ kernels: built when asked for and never otherwise, by several at once, and what users may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import geonorm
from geonorm import UserError, sphere_step
from geonorm.ops import build_cpu, cpp, which, why_not
from step_tools import WHY_NOT_CPP, rows, step_and_gradients

built = pytest.mark.skipif(WHY_NOT_CPP is not None, reason=str(WHY_NOT_CPP))
X = torch.ones(2, 3)


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GEONORM_CPP", raising=False)
    monkeypatch.setattr(cpp, "_loaded", None)
    return tmp_path / "cache"


def test_importing_and_stepping_builds_nothing_and_says_why(nothing_built):
    assert which(X) == "autograd"
    sphere_step(X, X)
    assert not nothing_built.exists()
    reason = why_not(X)
    assert reason is not None
    assert "build them once with geonorm.ops.build_cpu()" in reason
    assert "\n" not in reason


def lack_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def lack_ninja(monkeypatch):
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: False)


def lack_setuptools(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    monkeypatch.delattr(torch.utils, "cpp_extension", raising=False)


def lack_room(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.devnull)


@pytest.mark.parametrize(("lack", "message"), [
    (lack_compiler, "there is no 'no-such-compiler' on the PATH"),
    (lack_ninja, "ninja, which is missing; `pip install ninja`"),
    (lack_setuptools, "`pip install setuptools`"),
    (lack_room, "set TORCH_EXTENSIONS_DIR"),
])  # fmt: skip
def test_what_is_missing_is_named_when_forced_and_auto_goes_on(lack, message, nothing_built, monkeypatch):
    if lack is lack_room and shutil.which("c++") is None:
        pytest.skip("no C++ compiler, which is told first")
    lack(monkeypatch)
    for call in (build_cpu, lambda: sphere_step(X, X, impl="cpp")):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert which(X) == "autograd"
    assert bool(sphere_step(X, X).isfinite().all())


def test_another_device_is_named():
    with pytest.raises(UserError, match="impl='cpp' cannot run here: the tensor is on meta"):
        which(X.to("meta"), "cpp")


def test_the_source_lies_beside_the_module_and_names_the_folder(nothing_built, monkeypatch):
    assert cpp.SOURCE.is_file()
    folder = cpp.cache_folder()
    assert folder.parent == nothing_built
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert cpp.cache_folder() != folder


@built
def test_auto_takes_what_is_built_in_eager_mode_only(monkeypatch):
    monkeypatch.delenv("GEONORM_CPP", raising=False)
    assert (which(X), why_not(X)) == ("cpp", None)
    x, u = rows(4, 9, dtype=torch.float32, grad=False), rows(4, 9, dtype=torch.float32, grad=False)
    assert torch.equal(sphere_step(x, u), sphere_step(x, u, impl="cpp"))
    torch._dynamo.reset()
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(lambda x, u: sphere_step(x, u), fullgraph=True, backend=look)(x, u)
    assert not [name for name in seen if "sphere_step" in name]
    monkeypatch.setenv("GEONORM_CPP", "0")
    assert which(X) == "autograd"
    assert "GEONORM_CPP=0" in str(why_not(X))


@built
def test_the_number_of_threads_changes_no_bit():
    x, u, g = (rows(3000, 40, dtype=torch.float32, grad=False) for _ in range(3))
    one = step_and_gradients(x, u, 0.8, g, impl="cpp")
    torch.set_num_threads(2)
    two = step_and_gradients(x, u, 0.8, g, impl="cpp")
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@built
@pytest.mark.slow
def test_two_processes_build_at_once_and_a_stale_lock_is_no_obstacle(nothing_built):
    folder = cpp.cache_folder()
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    code = "import geonorm, torch; geonorm.ops.build_cpu(); x = torch.ones(2, 3); print(geonorm.ops.which(x))"
    environment = {**os.environ, "PYTHONPATH": str(Path(geonorm.__file__).parents[1])}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=600)[0].strip() for run in runs] == ["cpp", "cpp"]
    assert (folder / "finished").is_file()
