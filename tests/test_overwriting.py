"""Nothing is lost that a command did not write itself, and nothing before everything was checked; full disks."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from geonorm import UserError
from geonorm.cli import main
from geonorm.ops import which
from geonorm.training import folder as places
from geonorm.training.recipe import dump
from geonorm.training.run import run
from train_runs import assert_same_end, tiny, tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(tiny(corpus), out) == 0
    return out


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(finished), "--out", str(out)]) == 0
    return out


@pytest.fixture
def used(finished, tmp_path):
    """A finished run whose folder holds files of the user's own; they are named in ``mine``."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    mine = ["notes.txt", "plots/loss.png", "checkpoints/why.txt", "checkpoints/step-30/mine.txt", "model/card.md"]
    mine.append("checkpoints/step-24/merged.safetensors")
    mine.append("checkpoints/step-by-step.md")
    for name in (*mine, "metrics.jsonl.bak"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    return out


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "wrong",
    [
        ["data.corpus=/nonexistent"],
        ["data.seq_len=100000"],
        ["model.placement=prr"],
        ["model.num_heads=3"],
        ["model.start=/nonexistent"],
        ["model.hidden_size=1e9"],
        ["optimizer.lr=-1"],
        ["tracking.trackers=[wandb]"],
        ["--resume"],
    ],
    ids=" ".join,
)
def test_a_mistake_removes_nothing(corpus, used, tmp_path, monkeypatch, capsys, wrong):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = content(used)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(tiny(corpus)))
    assert main(["train", "--config", str(recipe), "--out", str(used), "--overwrite", *wrong]) == 2
    assert content(used) == before


def test_a_checkpoint_that_does_not_fit_the_disk_removes_nothing(corpus, used, monkeypatch):
    before = content(used)
    usage = shutil.disk_usage(used)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: usage._replace(free=0))
    monkeypatch.setattr(places.RunFolder, "_written", lambda self: iter(()))
    with pytest.raises(UserError, match=r"^a checkpoint takes .* GB, but the disk of .* has 0 GB left"):
        run(tiny(corpus), used, overwrite=True)
    assert content(used) == before


def test_overwriting_replaces_the_run_and_leaves_the_rest(corpus, finished, used):
    mine = {name: data for name, data in content(used).items() if data == b"mine"}
    assert len(mine) == 8
    # Out of the way of the new run's checkpoint of the same step.
    mine["checkpoints/left-of-step-30-1/mine.txt"] = mine.pop("checkpoints/step-30/mine.txt")
    mine["checkpoints/left-of-step-24-1/merged.safetensors"] = mine.pop("checkpoints/step-24/merged.safetensors")
    (used / "checkpoints" / "damaged-step-3-1").mkdir()
    assert run(tiny(corpus), used, overwrite=True) == 0
    assert_same_end(used, finished)
    after = content(used)
    assert {name: after.get(name) for name in mine} == mine
    left = {path.name for path in (used / "checkpoints").iterdir()}
    assert left == {"step-24", "step-30", "left-of-step-24-1", "left-of-step-30-1", "why.txt", "step-by-step.md"}
    assert {name for name in after if "left-of" in name} == {name for name in mine if "left-of" in name}


@pytest.mark.parametrize("record", [None, "{", "[]", '{"id": 7}', '{"run": "of another tool", "id": "x"}'])
def test_a_folder_is_a_run_only_if_its_own_record_says_so(corpus, used, record):
    (used / "run.json").unlink()
    if record is not None:
        (used / "run.json").write_text(record)
    before = content(used)
    for how in ("overwrite", "resume"):
        with pytest.raises(UserError, match="name another folder"):
            run(tiny(corpus), used, **{how: True})
    assert content(used) == before


def test_links_are_removed_and_not_what_they_lead_to(corpus, used, tmp_path):
    (tmp_path / "archive").mkdir()
    (used / "checkpoints" / "step-24").rename(tmp_path / "archive" / "step-24")
    (used / "checkpoints" / "step-24").symlink_to(tmp_path / "archive" / "step-24")
    shutil.rmtree(used / "checkpoints" / "step-30")
    before = content(tmp_path / "archive")
    assert run(tiny(corpus), used, overwrite=True) == 0
    assert content(tmp_path / "archive") == before


@pytest.mark.parametrize("name", ["model", "checkpoints", "tensorboard"])
def test_a_folder_that_is_a_link_is_not_overwritten(corpus, used, finished, tmp_path, name):
    if (used / name).exists():
        shutil.rmtree(used / name)
    shutil.copytree(finished / "checkpoints", tmp_path / "other")
    (used / name).symlink_to(tmp_path / "other")
    before = content(tmp_path)
    with pytest.raises(UserError, match=f"{name} is a link"):
        run(tiny(corpus), used, overwrite=True)
    assert content(tmp_path) == before


def test_a_run_names_the_implementation_of_its_step(finished):
    import torch

    assert json.loads((finished / "run.json").read_text())["step"] == [which(torch.empty(1, 1))]


def test_an_inspection_replaces_its_own_figures_only(exported, tmp_path, capsys):
    out = tmp_path / "inspection"
    words = ["inspect", str(exported), "--out", str(out), "--windows", "2", "--length", "16"]
    assert main([*words, "--gradients"]) == 0
    old = {path.name for path in (out / "figures").glob("*.svg")}
    (out / "figures" / "mine.svg").write_text("mine")
    assert main([*words, "--overwrite"]) == 0
    new = {path.name for path in (out / "figures").glob("*.svg")}
    assert "mine.svg" in new
    assert new - {"mine.svg"} < old
    (out / "inspection.json").write_text("{}")
    assert main([*words, "--overwrite"]) == 2
    assert "holds files that are no inspection" in capsys.readouterr().err


def test_an_evaluation_replaces_its_own_results_only(exported, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Ada sees a boat. " * 20)
    words = ["eval", str(exported), "--text", str(tmp_path / "text.txt"), "--length", "16", "--out"]
    (tmp_path / "thesis.json").write_text('{"mine": 1}')
    assert main([*words, str(tmp_path / "thesis.json")]) == 2
    assert "no result of geonorm eval" in capsys.readouterr().err
    for _ in range(2):
        assert main([*words, str(tmp_path / "results.json")]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["step"]


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("export {run} --out {out}", 4096),
        ("prepare {text} --out {out} --vocab-size 257 --min-documents 1", 2048),
        ("inspect {model} --out {out} --windows 2 --length 16", 100),
        ("inspect {model} --out {out} --windows 2 --length 16", 20_000),
        ("eval {model} --text {text} --length 16 --out {out}", 100),
        ("train --config {recipe} --out {out}", 30_000),
    ],
)
def test_a_disk_that_takes_no_more_is_one_line(corpus, finished, exported, tmp_path, capsys, words, limit):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number} Ada sees a boat and Ben takes the hill. " * 30)
    (tmp_path / "recipe.yaml").write_text(dump(tiny(corpus)))
    names = {"run": finished, "model": exported, "text": tmp_path / "0.txt", "recipe": tmp_path / "recipe.yaml"}
    if "prepare" in words:
        names["text"] = tmp_path / "*.txt"
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = main(words.format(out=out, **names).split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert code == 2, error
    assert "File too large" in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    if "export" in words:
        assert not out.exists()


def test_tests_keep_to_a_cache_of_their_own():
    code = "from geonorm.ops.cpp import cache_folder; print(cache_folder())"
    folder = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not folder.startswith(str(Path.home() / ".cache"))
