"""Checkpoint files under attack and under bad luck: crafted pickles, a full disk, a kill in the middle of a save."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geonorm import UserError
from geonorm.cli import main
from geonorm.training import checkpoint as saving
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.distributed import solo
from geonorm.training.manifest import MANIFEST, verify
from geonorm.training.recipe import dump
from geonorm.training.run import run
from train_runs import assert_same_end, finish, tensor_names, tiny, tiny_corpus

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run(tiny(corpus), out) == 0
    return out


class Bomb:
    """A pickle that makes a folder when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def crafted(target: Path) -> dict[str, bytes]:
    """The same call as a bare pickle and as a torch file."""
    path = target.with_suffix(".pt")
    torch.save(Bomb(target), path)
    return {"pickle": pickle.dumps(Bomb(target)), "torch": path.read_bytes()}


def write_manifest(folder: Path) -> None:
    """Make the manifest fit whatever lies beside it, as somebody would who knows how."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["digest"]
    files = (path for path in folder.iterdir() if path.name != MANIFEST)
    manifest["files"] = {
        path.name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files
    }
    text = json.dumps(manifest, sort_keys=True)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("fitting", [False, True])
def test_a_crafted_pickle_in_place_of_each_file_is_refused(corpus, straight, tmp_path, capsys, kind, fitting):
    files = sorted(path.relative_to(straight) for path in (straight / "checkpoints" / "step-30").iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    # And where DCP's own format has its pickle.
    for number, file in enumerate(
        [*files, Path("checkpoints/step-30/.metadata"), Path("run.json"), Path("config.yaml")]
    ):
        out, target = tmp_path / str(number), tmp_path / f"ran-{number}"
        shutil.copytree(straight, out)
        (out / file).write_bytes(crafted(target)[kind])
        if fitting and file.parent.name == "step-30" and file.name != MANIFEST:
            write_manifest(out / file.parent)
        if file.parent == Path():
            with pytest.raises(UserError, match=r"^[^\n]+$"):
                run(tiny(corpus), out, resume=True)
        else:
            assert run(tiny(corpus), out, resume=True) == 0
            assert (fitting and file.name == ".metadata") or "not used: " in capsys.readouterr().out
            assert_same_end(out, straight)
        assert not target.exists(), file
    pickle.loads(crafted(tmp_path / "ran")["pickle"])
    assert (tmp_path / "ran").exists()


def test_where_no_checkpoint_is_good_no_resume_starts_anew(corpus, straight, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    for path in (out / "checkpoints").iterdir():
        (path / MANIFEST).write_text("{")
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    # A job script gives --resume again and again.
    for _ in range(2):
        with pytest.raises(UserError, match="none of the 2 checkpoints"):
            run(tiny(corpus), out, resume=True)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before
    assert (out / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_nothing_in_a_checkpoint_is_a_pickle(straight):
    for path in (straight / "checkpoints" / "step-30").iterdir():
        if path.suffix == ".safetensors":
            assert tensor_names(path)
        else:
            json.loads(path.read_text())


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_is_one_line_and_loses_nothing(corpus, straight, tmp_path, monkeypatch, capsys, background):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(tiny(corpus, f"checkpoint.background={background}")))
    words = ["train", "--config", str(recipe), "--out", str(tmp_path / "run"), "--resume"]
    original, calls = saving.HuggingFaceStorageWriter.write_data, []

    def write_data(self, plan, planner):
        calls.append(1)
        if len(calls) == 3:
            (Path(self.path) / "half.safetensors").write_bytes(b"0" * 10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, plan, planner)

    with monkeypatch.context() as patch:
        patch.setattr(saving.HuggingFaceStorageWriter, "write_data", write_data)
        assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot save the checkpoint of step 24 in ")
    assert "No space left on device; older ones are untouched" in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-16", "step-8"]
    assert main(words) == 0
    assert "going on from step 16" in capsys.readouterr().out
    assert_same_end(tmp_path / "run", straight)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from geonorm.training import checkpoint as saving
from geonorm.training.run import run
from train_runs import tiny
original, calls = saving.{patched}, []
def die(*args, **kwargs):
    calls.append(1)
    if len(calls) == {call}:
        if {after}:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
saving.{patched} = die
run(tiny(Path({corpus!r})), Path({out!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patched", "call", "after", "step"),
    [
        ("sha256", 3, False, 16),
        ("write_manifest", 3, True, 16),
        ("sync_folder", 6, False, 24),
        ("HuggingFaceStorageWriter.write_data", 1, True, None),
    ],
)
def test_killed_in_the_middle_of_a_save(corpus, straight, tmp_path, capsys, patched, call, after, step):
    values = {"tests": str(TESTS), "corpus": str(corpus.path), "out": str(tmp_path / "run")}
    code = KILLED.format(patched=patched, call=call, after=after, **values)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finish(tiny(corpus), tmp_path / "run")
    said = capsys.readouterr().out
    assert (f"going on from step {step}" in said) if step else ("going on" not in said)
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial*"))
    assert_same_end(tmp_path / "run", straight)


def test_a_checkpoint_of_another_model_is_refused(corpus, straight, tmp_path):
    found = verify(straight / "checkpoints" / "step-30")
    wrong = {"model.lm_head.weight": torch.zeros(3, 3)}
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        Checkpoints(straight / "checkpoints", solo(torch.device("cpu"))).load(found, wrong)


def test_errors_in_the_background_come_out(tmp_path):
    checkpoints = Checkpoints(tmp_path / "file", solo(torch.device("cpu")), background=True)
    (tmp_path / "file").write_text("")
    checkpoints.save(1, {"x": torch.zeros(2)}, {})
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1"):
        checkpoints.wait()
    checkpoints.wait()
