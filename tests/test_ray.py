"""Comparisons on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corpora import small_corpus, write_documents
from geonorm import UserError
from geonorm.cli import main
from geonorm.sweep.axes import Corpus, make_sweep
from geonorm.sweep.display import Display
from geonorm.sweep.executors import Executor, Resources, TrialProcess, last_words, spec_path
from geonorm.sweep.machines import difference
from geonorm.sweep.on_ray import RayExecutor
from geonorm.sweep.ray_ranks import RayOptions
from geonorm.training import recipe
from geonorm.training.setup import corpus_identity
from processes import parent, trial_processes, wait_for
from tolerances import PARALLEL_LOSS

WORDS = ["steps=6", "model.hidden_size=16", "data.seq_len=16", "evaluation.windows=8"]
TWELVE = [
    "--placements",
    "geonorm",
    "pre",
    "--lrs",
    "1e-3",
    "2e-3",
    "4e-3",
    "--seeds",
    "0",
    "1",
    "--full-grid",
    "--no-refine",
]
OLD = {"versions": {"geonorm": "0.0.1+old"}}
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("GEONORM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def address(cache):
    """A cluster of two nodes with one CPU each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
        nodes = Nodes(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        nodes.add_node(**small)
        yield nodes.address
        nodes.shutdown()


def command(out: Path, data: Path, *words: str, run: tuple[str, ...] = ()) -> list[str]:
    return ["compare", *WORDS, *run, "--preset", "tiny", "--data", str(data), "--out", str(out), *words]


def run_compare(out: Path, data: Path, *words: str, run: tuple[str, ...] = ()) -> int:
    return main(command(out, data, *words, run=run))


def on_ray(address: str) -> list[str]:
    return ["--executor", "ray", "--address", address]


def results_in(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def outcomes(out: Path) -> dict[str, dict]:
    """What a comparison found, without times, by file; fails if a trial stands in it twice."""
    trials = results_in(out)["trials"]
    found = {trial["id"]: {key: value for key, value in trial.items() if key not in TIMES} for trial in trials}
    assert len(found) == len(trials)
    for name in found:
        folder = out / "trials" / name
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len({(row["kind"], row["step"]) for row in rows}) == len(rows)
        clock = (*TIMES, "step_seconds", "mfu")
        found[name]["rows"] = [{key: value for key, value in row.items() if key not in clock} for row in rows]
        found[name]["test_windows"] = (folder / "test_windows.json").read_bytes()
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory, data, cache):
    """What the local executor finds."""
    out = tmp_path_factory.mktemp("local") / "run"
    assert run_compare(out, data, *TWELVE) == 0
    return outcomes(out)


@needs_proc
@pytest.mark.slow
def test_a_killed_worker_costs_no_result_and_changes_no_bit(address, cache, data, local, tmp_path, monkeypatch):
    orphans = []
    original = Display.progress

    def progress(self, running):
        original(self, running)
        if not orphans and (processes := trial_processes(tmp_path)):
            orphans.append(processes[0])
            os.kill(parent(processes[0]), signal.SIGKILL)

    monkeypatch.setattr(Display, "progress", progress)
    assert run_compare(tmp_path / "run", data, *TWELVE, *on_ray(address)) == 0
    assert orphans
    assert not trial_processes(tmp_path)
    assert len(local) == 12
    assert outcomes(tmp_path / "run") == local
    results = results_in(tmp_path / "run")
    assert list(outcomes(tmp_path / "run")) == [trial["id"] for trial in results["trials"]]
    assert results["environment"]["executor"].startswith("ray ")
    assert results["environment"]["machines"] == 2


@needs_proc
@pytest.mark.slow
def test_a_trial_that_is_killed_goes_on_elsewhere_from_its_checkpoint(address, cache, data, tmp_path, monkeypatch):
    run = ("steps=60", "checkpoint.every=20", "evaluation.log_every=1")
    words = ["--placements", "geonorm", "--seeds", "0"]
    assert run_compare(tmp_path / "whole", data, *words, run=run) == 0
    killed = []

    def progress(self, running):
        if not killed and (running.folder / "checkpoints" / "step-40").exists():
            (process,) = trial_processes(tmp_path)
            os.kill(process, signal.SIGKILL)
            killed.append(process)

    monkeypatch.setattr(Display, "progress", progress)
    assert run_compare(tmp_path / "killed", data, *words, *on_ray(address), run=run) == 0
    assert killed
    assert outcomes(tmp_path / "killed") == outcomes(tmp_path / "whole")
    (log,) = (tmp_path / "killed" / "trials").glob("*.log")
    assert "going on from step 40" in log.read_text()


@needs_proc
@pytest.mark.slow
def test_after_a_killed_driver_resume_runs_what_is_missing(address, cache, data, local, tmp_path):
    out = tmp_path / "run"
    words = command(out, data, *TWELVE, *on_ray(address))
    driver = subprocess.Popen(
        [sys.executable, "-m", "geonorm", *words], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        wait_for(lambda: len(list(out.glob("trials/*/result.json"))) >= 3 and bool(trial_processes(out)), 900)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not trial_processes(out))
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")}
    assert 3 <= len(stamps) < 12
    assert main([*words, "--resume"]) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert outcomes(out) == local


@pytest.mark.slow
def test_a_trial_that_is_always_killed_fails_after_its_retries(address, cache, data, tmp_path, monkeypatch, capsys):
    kills = []

    def progress(self, running):
        for process in trial_processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                kills.append(process)

    monkeypatch.setattr(Display, "progress", progress)
    words = ["--placements", "pre", *on_ray(address), "--retries", "1"]
    assert run_compare(tmp_path / "run", data, *words, run=("steps=3000",)) == 1
    assert len(kills) == 2
    (trial,) = results_in(tmp_path / "run")["trials"]
    assert trial["status"] == "failed"
    assert trial["message"].startswith("killed by signal 9")
    assert "not finished" not in capsys.readouterr().err


def test_one_trial_through_a_real_cluster(address, cache, data, tmp_path, monkeypatch):
    handlers, original = set(), Display.progress

    def progress(self, running):
        handlers.add(signal.getsignal(signal.SIGTERM))
        original(self, running)

    monkeypatch.setattr(Display, "progress", progress)
    before = signal.getsignal(signal.SIGTERM)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", *on_ray(address)) == 0
    # Ray puts a handler of its own there, which would leave trials running and say nothing.
    assert [getattr(handler, "__module__", None) for handler in handlers] == ["geonorm.signals"]
    assert signal.getsignal(signal.SIGTERM) is before
    (outcome,) = outcomes(tmp_path / "run").values()
    assert (outcome["status"], outcome["step"]) == ("ok", 6)


def test_a_machine_that_does_not_see_the_folders_is_named(address, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    with (
        pytest.raises(UserError, match=r"of the Ray cluster does not see /nowhere; put `out` and the corpus"),
        RayExecutor(RayOptions(address), None, (there, Path("/nowhere"))),
    ):
        pass


def test_versions_that_differ_are_named():
    mine = {"geonorm": "0.1.0+aa", "torch": "2.13.0+cpu", "transformers": "5.24.0"}
    assert difference(dict(mine), mine) == ""
    assert difference({**mine, "torch": "2.13.0+cu130"}, mine) == ""
    assert difference({**mine, "torch": "2.12.0+cpu"}, mine) == "runs torch 2.12.0+cpu, this one 2.13.0+cpu"
    assert difference({**mine, "geonorm": "0.1.0+bb"}, mine) == "runs geonorm 0.1.0+bb, this one 0.1.0+aa"
    assert "has no geonorm" in difference(None, mine)


@pytest.mark.slow
def test_other_code_than_the_cluster_runs_is_refused(address, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("geonorm.sweep.on_ray.describe_machine", lambda: OLD)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", *on_ray(address)) == 2
    error = capsys.readouterr().err
    assert "of the Ray cluster runs geonorm 0.1.0+" in error
    assert "this one 0.0.1+old; install the same on every machine" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "auto"], "`address` is for Ray; add --executor ray"),
        (["--gpus-per-trial", "1"], "`gpus_per_trial` is for Ray; add --executor ray"),
        (["--executor", "ray", "--cpus-per-trial", "0"], "`cpus_per_trial` must be a whole number of at least 1"),
        (["--executor", "ray", "--gpus-per-trial", "1.5"], "`gpus_per_trial` above 1 must be a whole number, got 1.5"),
        (["--executor", "ray", "--gpus-per-trial", "-1"], "`gpus_per_trial` must be a number in [0, 1e+06], got -1"),
        (["--executor", "ray", "--ranks-per-trial", "2"], "`ranks_per_trial` 2 needs as many --cpus-per-trial, got 1"),
        (
            ["--executor", "ray", "--ranks-per-trial", "3", "--cpus-per-trial", "3"],
            "`global_batch_size` 4 is not a multiple of 3 ranks",
        ),
        (["--executor", "ray", "--retries", "-1"], "`retries` must be a whole number of at least 0"),
        (["--executor", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at `address` 127.0.0.1:1"),
        (["--executor", "ray", "--address", "ray://localhost:10001"], "is for Ray Client"),
        (["--executor", "ray", "--address", "somewhere"], "`address` must be HOST:PORT or auto, got 'somewhere'"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(words, message, data, cache, tmp_path, capsys):
    pytest.importorskip("ray")
    assert run_compare(tmp_path / "run", data, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_without_ray_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed; run pip install 'geonorm\[ray\]'"):
        RayExecutor(RayOptions(), None, ()).__enter__()


def test_ranks_share_the_cpus_of_a_trial():
    assert RayOptions().resources == Resources(1, 1)
    assert RayOptions(gpus=4, cpus=8, ranks=4).resources == Resources(2, 4)
    assert RayOptions(cpus=4, ranks=2).resources == Resources(2, 2)
    assert RayOptions(cpus=4, ranks=2).bundle == {"CPU": 2, "GPU": 0}
    # GPUs need not have a CPU each.
    assert RayOptions(gpus=4, cpus=2, ranks=4).bundle == {"CPU": 0.5, "GPU": 1}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_of_a_trial_find_what_one_process_finds(tmp_path, parallel):
    """On the CPU, by torch's launcher as inside a Ray task; ranks sum in another order, so results are close."""
    trial = make_trial(tmp_path, "geonorm:learnable=true", "steps=6", f"parallel={parallel}")
    results = {}
    for ranks in (1, 2):
        one = dataclasses.replace(trial.config, parallel=parallel if ranks > 1 else "none")
        (results[ranks],) = Executor(1, Resources(ranks=ranks)).run(
            [dataclasses.replace(trial, config=one)], tmp_path / str(ranks)
        )
    assert [(result.world_size, result.step) for result in results.values()] == [(1, 6), (2, 6)]
    assert results[2].num_parameters == results[1].num_parameters
    assert results[2].val_loss == pytest.approx(results[1].val_loss, rel=PARALLEL_LOSS)
    one, two = ((tmp_path / name / trial.id / "metrics.jsonl").read_text().splitlines() for name in ("1", "2"))
    assert len(one) == len(two)


def make_trial(folder: Path, placement: str, *words: str):
    corpus = small_corpus(folder)
    known = Corpus(corpus.path, corpus_identity(corpus), corpus.description["fingerprint"])
    plan = make_sweep(overrides=[*WORDS, *words], preset="tiny", axes={"placements": [placement], "seeds": [0]})
    (trial,) = plan.first_trials(known)
    return trial


@needs_proc
@pytest.mark.slow
def test_ranks_on_two_machines_find_what_they_find_on_one(address, cache, data, tmp_path, monkeypatch):
    """Also when one of them is killed, which starts both again from their checkpoint."""
    run = ("steps=60", "checkpoint.every=20", "evaluation.log_every=1")
    words = ["--placements", "geonorm", "--seeds", "0", "--ranks-per-trial", "2"]
    assert run_compare(tmp_path / "one", data, *words, run=run) == 0
    # Each machine of the cluster has one CPU.
    words += ["--cpus-per-trial", "2", *on_ray(address)]
    assert run_compare(tmp_path / "two", data, *words, run=run) == 0
    (outcome,) = outcomes(tmp_path / "two").values()
    assert (outcome["status"], outcome["step"], outcome["world_size"]) == ("ok", 60, 2)
    assert outcomes(tmp_path / "two") == outcomes(tmp_path / "one")
    killed = []

    def progress(self, running):
        if not killed and (running.folder / "checkpoints" / "step-40").exists():
            processes = trial_processes(tmp_path)
            assert len({parent(process) for process in processes}) == 2
            os.kill(processes[-1], signal.SIGKILL)
            killed.append(processes[-1])

    monkeypatch.setattr(Display, "progress", progress)
    assert run_compare(tmp_path / "killed", data, *words, run=run) == 0
    assert killed
    assert outcomes(tmp_path / "killed") == outcomes(tmp_path / "one")
    (log,) = (path for path in (tmp_path / "killed" / "trials").glob("*.log") if ".rank" not in path.name)
    assert "going on from step 40" in log.read_text()


@needs_proc
@pytest.mark.slow
def test_ranks_end_with_whoever_started_their_launcher(tmp_path):
    trial = make_trial(tmp_path, "pre", "steps=1000000", "parallel=ddp")
    folder = tmp_path / "trials" / trial.id
    folder.parent.mkdir()
    recipe.save(spec_path(folder), trial.config)
    running = TrialProcess(folder, Resources(ranks=2))
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists(), 900)
        assert len(trial_processes(tmp_path)) == 3
    finally:
        running.process.stdin.close()
    wait_for(lambda: not trial_processes(tmp_path))
    running.process.wait()


def test_the_cause_is_told_from_the_launchers_words():
    launcher = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "=" * 60, "x FAILED", "=" * 60]
    assert last_words("\n".join(["[rank1]: RuntimeError: no room", *launcher])) == "RuntimeError: no room"
    assert last_words("\n".join(["error: the id 7", "error: the id 7", *launcher])) == "error: the id 7"
    assert last_words("Traceback\nValueError: 3\n") == "ValueError: 3"
    assert last_words("") == "no output"
