"""Two gloo ranks on the CPU: every placement matches one process, checkpoints move between numbers of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from geonorm.placements import available
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.distributed import solo
from geonorm.training.manifest import verify
from geonorm.training.recipe import dump
from tolerances import MUON_SHARDED, TWO_RANKS
from train_runs import assert_same_end, finish, rows, tiny, tiny_corpus

TESTS = Path(__file__).resolve().parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def two_ranks(*words: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess:
    return subprocess.run([*TORCHRUN, *words], stdin=stdin, capture_output=True, text=True, env=ENVIRONMENT)


def check_cases(corpus, out: Path, placements: list[str]) -> None:
    out.mkdir()
    done = two_ranks(str(TESTS / "mp_train.py"), str(corpus.path), str(out), *placements)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "returned a view" not in done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    # A learnable alpha, Muon and the options of every placement run as well, and each case under DDP and under FSDP2.
    assert len(cases) == 2 * (len(placements) + 3)
    for case in cases:
        later = MUON_SHARDED if case["muon"] else TWO_RANKS
        assert case["gradient"] <= TWO_RANKS, case
        assert max(case["loss"], case["layers"]) <= later, case
        assert case["losses"][0] > case["losses"][-1]
        assert case["length"] <= TWO_RANKS
    for kind in ("ddp", "fsdp"):
        saved = verify(out / kind / "step-4")
        assert {path.name[:11] for path in saved.path.glob("*.safetensors")} == {"shard-00001", "shard-00002"}
        want = load_file(out / f"{kind}.safetensors")
        into = {name: torch.full(shape, 9, dtype=dtype) for name, (shape, dtype) in saved.shapes.items()}
        Checkpoints(out / kind, solo(torch.device("cpu"))).load(saved, into)
        assert {"random.0.cpu", "random.1.cpu"} <= into.keys()
        for name, value in want.items():
            assert torch.equal(into[name], value), name


def test_a_learnable_alpha_muon_and_the_options_of_every_placement_match_one_process(corpus, tmp_path):
    # The one placement that changes weights after a step, which FSDP2 has cut up, is cheap enough to run always.
    check_cases(corpus, tmp_path / "out", ["ngpt"])


@pytest.mark.slow
def test_every_placement_matches_one_process(corpus, tmp_path):
    check_cases(corpus, tmp_path / "out", available())


@pytest.fixture(scope="module")
def recipe(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(dump(tiny(corpus, "model.options.learnable=true", "sampling.every=20")))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_from_two_ranks_to_one_and_back(corpus, recipe, tmp_path, kind):
    """Also C2: no terminal, no key, no network, two ranks give plain lines of rank 0 and no prompt."""
    out = tmp_path / "two"
    words = ["-m", "geonorm", "train", "--config", str(recipe), "--parallel", kind, "--out"]
    done = two_ranks(*words, str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\x1b" not in done.stdout
    assert sum(line.startswith("step 30/30  validation loss") for line in done.stdout.splitlines()) == 1
    assert sum(line.startswith("finished: ") for line in done.stdout.splitlines()) == 1

    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "step-30")
    done = two_ranks(*words, str(again), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_end(again, out)

    config = tiny(corpus, "model.options.learnable=true", "sampling.every=20")
    one = tmp_path / "one"
    shutil.copytree(out, one)
    shutil.rmtree(one / "checkpoints" / "step-30")
    finish(config, one)
    mine, theirs = ([row["loss"] for row in rows(folder)] for folder in (one, out))
    assert mine == pytest.approx(theirs, rel=TWO_RANKS)

    shutil.rmtree(one / "checkpoints" / "step-30")
    done = two_ranks(*words, str(one), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["loss"] for row in rows(one)] == pytest.approx(theirs, rel=TWO_RANKS)


@pytest.mark.slow
def test_a_mistake_is_one_line_of_rank_0(recipe, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    words = ["-m", "geonorm", "train", "--config", str(recipe), "--parallel", "ddp", "--out", str(tmp_path / "full")]
    done = two_ranks(*words)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "is not empty" in lines[0]


def rank_1_of(out: Path) -> int:
    """Process id of rank 1 of the run in a folder."""
    for folder in Path("/proc").iterdir():
        try:
            if str(out).encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if b"RANK=1" in variables:
                    return int(folder.name)
        except OSError:
            continue
    raise AssertionError("no rank 1")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank's process in /proc")
@pytest.mark.parametrize("how", ["a rank is lost", "all are asked to end"])
def test_what_is_left_can_be_resumed(recipe, tmp_path, how):
    out, log = tmp_path / "run", tmp_path / "log"
    words = ["-m", "geonorm", "train", "--config", str(recipe), "--parallel", "fsdp", "--out", str(out)]
    words += ["steps=100000", "checkpoint.every=20", "evaluation.log_every=10", "evaluation.every=100000"]
    with log.open("wb") as file:
        run = subprocess.Popen([*TORCHRUN, *words], stdout=file, stderr=file, env=ENVIRONMENT)
        until = time.monotonic() + 120
        while not (out / "checkpoints" / "step-20").exists() and time.monotonic() < until:
            time.sleep(0.1)
        if how == "a rank is lost":
            os.kill(rank_1_of(out), signal.SIGKILL)
        else:
            run.send_signal(signal.SIGTERM)
        # torchrun answers 1 whatever its ranks answer.
        assert run.wait(timeout=120) == 1
    said = log.read_text()
    if how == "a rank is lost":
        assert said.count("lost another rank (") == 1
    else:
        assert said.count("asked to end: saved step ") == 1
    steps = Checkpoints(out / "checkpoints", solo(torch.device("cpu"))).steps()
    verify(out / "checkpoints" / f"step-{steps[-1]}")
