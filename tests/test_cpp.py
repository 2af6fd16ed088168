"""The C++ kernels: built once, beside the work or before it, by whoever comes first; and what users may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from geonorm import UserError, sphere_step
from geonorm.ops import build_cpu, cpp, ensure_cpu_kernels, which, why_not
from step_tools import WHY_NOT_CPP, rows, step_and_gradients

built = pytest.mark.skipif(WHY_NOT_CPP is not None, reason=str(WHY_NOT_CPP))
X = torch.ones(2, 3)
BEGUN = "building the C++ kernels of the step beside this work"
COMPLAINT = "building the C++ kernels failed: step_cpu.cpp:1: error: no room; impl='auto' works without them"


class Compiler:
    """Stands in for the C++ compiler: counts its calls, then takes what was built before, or fails."""

    def __init__(self, folder, patch):
        self.folder, self.patch, self.calls = folder, patch, folder / "calls"
        self.calls.touch()

    def does(self, *commands):
        script = self.folder / "compiler"
        script.write_text("\n".join(["#!/bin/sh", f"echo >> {self.calls}", *commands]))
        script.chmod(0o755)
        self.patch.setenv("CXX", str(script))

    def fails(self):
        self.does("echo note >&2", "echo 'step_cpu.cpp:1: error: no room' >&2", "exit 1")

    @property
    def num_calls(self):
        return len(self.calls.read_text())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with nothing in it, which nobody is forbidden to fill; in the end this process has its kernels again."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GEONORM_CPP", raising=False)
    yield tmp_path / "cache"
    monkeypatch.undo()
    if WHY_NOT_CPP is None:
        build_cpu()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    compiler = Compiler(tmp_path, monkeypatch)
    if WHY_NOT_CPP is None:
        compiler.does('while [ "$1" != -o ]; do shift; done', f'cp {build_cpu()} "$2"')
    return compiler


def python(*lines):
    """What a process of its own prints, and what it logs."""
    lines = ("import logging, torch; logging.basicConfig(level='INFO', format='%(message)s')", *lines)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.stdout.split(), done.stderr.splitlines()


def wait_for(path):
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"no {path}")


# --- built without being asked --------------------------------------------------------------------------------------


@built
def test_the_first_step_begins_a_build_and_its_process_goes_on_as_it_began(compiler, cache):
    said, logged = python(
        "import os, pathlib, time, geonorm",
        "from geonorm.ops import cpp, which",
        "x = torch.ones(2, 3)",
        "print(which(x), os.path.exists(os.environ['TORCH_EXTENSIONS_DIR']))",
        "geonorm.sphere_step(x, x)",
        "library = next(pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR']).iterdir()) / 'geonorm_step_cpu.so'",
        "while not library.exists(): time.sleep(0.05)",
        "geonorm.sphere_step(x, x)",
        "print(which(x))",
    )
    assert said == ["autograd", "False", "autograd"]
    assert [line.partition(",")[0] for line in logged] == [BEGUN]
    assert python("from geonorm.ops import which", "print(which(torch.ones(1)))") == (["cpp"], [])
    assert compiler.num_calls == 1


@built
def test_a_run_has_the_kernels_from_its_beginning_to_its_end_or_never(compiler, cache, caplog):
    caplog.set_level("INFO")
    assert ensure_cpu_kernels() == which(X) == "autograd"
    wait_for(next(cache.iterdir()) / "geonorm_step_cpu.so")
    sphere_step(X, X, impl="cpp")
    assert which(X) == "autograd"
    assert "were not there when this run began; build them once with geonorm.ops.build_cpu()" in str(why_not(X))
    assert ensure_cpu_kernels() == which(X) == "cpp"
    assert len(caplog.messages) == compiler.num_calls == 1
    assert caplog.messages[0].startswith(BEGUN)


@built
def test_a_run_may_wait_and_one_that_goes_on_takes_what_it_was_begun_with(compiler, cache, caplog):
    caplog.set_level("INFO")
    assert ensure_cpu_kernels(recorded="autograd") == which(X) == "autograd"
    assert not cache.exists()
    assert "begun without them" in str(why_not(X))
    assert ensure_cpu_kernels(wait=True) == which(X) == "cpp"
    assert caplog.messages == ["building the C++ kernels of the step, once for this machine: about a minute"]
    assert ensure_cpu_kernels(recorded="autograd") == which(X) == "autograd"
    assert ensure_cpu_kernels(recorded="cpp") == which(X) == "cpp"
    shutil.rmtree(cache)
    assert ensure_cpu_kernels(recorded="cpp") == which(X) == "cpp"
    assert compiler.num_calls == 2


@built
def test_several_build_at_once_and_what_a_killed_build_left_is_no_obstacle(compiler, cache):
    folder = cpp.cache_folder()
    folder.mkdir(parents=True)
    (folder / "building").touch()
    (folder / "unfinished.so").write_bytes(b"half of a library")
    code = "import torch, geonorm.ops; print(geonorm.ops.ensure_cpu_kernels(wait=True))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    several = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in several] == ["cpp", "cpp"]
    assert compiler.num_calls == 1


def test_nothing_is_built_where_it_is_forbidden_or_of_no_use(compiler, cache):
    said, logged = python(
        "import os, geonorm",
        "from geonorm.ops import build_cpu, ensure_cpu_kernels, which, why_not",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "x = torch.ones(2, 3)",
        "which(x), why_not(x)",
        "geonorm.sphere_step(x, x, impl='autograd')",
        "torch.compile(geonorm.sphere_step, backend='eager', fullgraph=True)(x, x)",
        "with FakeTensorMode(): geonorm.sphere_step(torch.ones(2), torch.ones(2))",
        "os.environ['GEONORM_CPP'] = '0'",
        "geonorm.sphere_step(x, x)",
        "print(ensure_cpu_kernels(wait=True), ensure_cpu_kernels(recorded='cpp'), ensure_cpu_kernels())",
    )
    assert (said, logged) == (["autograd"] * 3, [])
    assert compiler.num_calls == 0
    assert not cache.exists()


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_build_that_failed_is_said_once_and_not_tried_again(compiler, cache, caplog):
    compiler.fails()
    assert [ensure_cpu_kernels(wait=True) for _ in range(3)] == ["autograd"] * 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [COMPLAINT]
    assert python("from geonorm.ops import ensure_cpu_kernels", "ensure_cpu_kernels()") == ([], [])
    assert f"delete {cpp.cache_folder()} to have it tried again" in str(why_not(X))
    assert compiler.num_calls == 1
    with pytest.raises(UserError, match="error: no room"):
        build_cpu()
    assert compiler.num_calls == 2


def test_a_build_that_failed_beside_the_work_is_said_by_the_next_run(compiler, cache, caplog):
    compiler.fails()
    assert ensure_cpu_kernels() == "autograd"
    wait_for(cpp.cache_folder() / "failed")
    caplog.clear()
    assert [ensure_cpu_kernels() for _ in range(3)] == ["autograd"] * 3
    assert caplog.messages == [COMPLAINT]
    assert compiler.num_calls == 1


def lack_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def lack_room(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.devnull)


@pytest.mark.parametrize(("lack", "message"), [
    (lack_compiler, "there is no 'no-such-compiler' on the PATH"),
    (lack_room, "set TORCH_EXTENSIONS_DIR"),
])  # fmt: skip
def test_what_is_missing_is_named_when_forced_and_auto_goes_on(lack, message, compiler, cache, monkeypatch):
    if lack is lack_room and shutil.which("c++") is None:
        pytest.skip("no C++ compiler, which is told first")
    lack(monkeypatch)
    for call in (build_cpu, lambda: sphere_step(X, X, impl="cpp")):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert [ensure_cpu_kernels(), ensure_cpu_kernels(wait=True), which(X)] == ["autograd"] * 3
    assert bool(sphere_step(X, X).isfinite().all())


@built
def test_a_library_that_cannot_be_loaded_is_named(cache):
    folder = cpp.cache_folder()
    folder.mkdir(parents=True)
    (folder / "geonorm_step_cpu.so").write_bytes(b"no library")
    said, _ = python(
        "from geonorm.ops import build_cpu, ensure_cpu_kernels",
        "print(ensure_cpu_kernels(wait=True))",
        "try: build_cpu()",
        "except Exception as error: print(error)",
    )
    assert said[0] == "autograd"
    assert (
        " ".join(said[1:])
        == f"no C++ kernels: the library in {folder} cannot be loaded; delete that folder and build again"
    )


def test_another_device_is_named():
    with pytest.raises(UserError, match="impl='cpp' cannot run here: the tensor is on meta"):
        which(X.to("meta"), "cpp")


def test_the_source_lies_beside_the_module_and_names_the_folder(cache, monkeypatch):
    assert cpp.SOURCE.is_file()
    folder = cpp.cache_folder()
    assert folder.parent == cache
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert cpp.cache_folder() != folder


# --- built ----------------------------------------------------------------------------------------------------------


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
def test_the_compiler_of_this_machine_builds_them(cache):
    code = ("import geonorm.ops", "print(geonorm.ops.ensure_cpu_kernels(wait=True))")
    assert python(*code)[0] == ["cpp"]
    assert not {"unfinished.so", "failed"} & {file.name for file in cpp.cache_folder().iterdir()}
