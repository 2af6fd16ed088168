"""Comparisons on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from geonorm.experiments import remote
from geonorm.experiments.cluster import Cluster, ClusterOptions, difference
from geonorm.experiments.config import CompareConfig
from geonorm.experiments.corpus_transfer import CorpusOffer, corpus_key, find_corpus, read_pieces
from geonorm.experiments.display import Display
from geonorm.experiments.plan import CorpusKey, make_plan
from geonorm.experiments.process import Resources, last_words, start_process

from corpora import small_corpus, write_documents
from geonorm import UserError
from geonorm.cli import main
from processes import parent, trial_processes, wait_for
from tolerances import PARALLEL_LOSS

SMALL = ["--preset", "tiny", "--steps", "6", "--width", "16", "--length", "16", "--eval-windows", "8"]
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


def run_compare(out: Path, data: Path, *words: str) -> int:
    return main(["compare", *SMALL, "--data", str(data), "--out", str(out), *words])


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
        found[name]["rows"] = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
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
def test_a_killed_worker_costs_no_result_and_changes_no_bit(address, cache, data, local, tmp_path, monkeypatch, capsys):
    orphans, folders = [], []
    original = Display.progress

    def progress(self, running):
        original(self, running)
        if not orphans and (processes := trial_processes(cache)):
            orphans.append(processes[0])
            words = Path(f"/proc/{processes[0]}/cmdline").read_text().split("\0")
            folders.append(Path(words[words.index("geonorm.experiments.worker") + 1]))
            assert folders[0].exists()
            os.kill(parent(processes[0]), signal.SIGKILL)

    monkeypatch.setattr(Display, "progress", progress)
    assert run_compare(tmp_path / "run", data, *TWELVE, *on_ray(address)) == 0
    assert "the worker was lost (WorkerCrashedError); starting it anew" in capsys.readouterr().out
    assert not trial_processes(cache)
    assert not folders[0].exists()
    assert len(local) == 12
    assert outcomes(tmp_path / "run") == local
    results = results_in(tmp_path / "run")
    assert list(outcomes(tmp_path / "run")) == [trial["id"] for trial in results["trials"]]
    assert results["environment"]["executor"].startswith("ray ")
    assert results["environment"]["machines"] == 2


@needs_proc
@pytest.mark.slow
def test_after_a_killed_driver_resume_runs_what_is_missing(address, cache, data, local, tmp_path):
    out = tmp_path / "run"
    words = [*SMALL, "--data", str(data), "--out", str(out), *TWELVE, *on_ray(address)]
    driver = subprocess.Popen(
        [sys.executable, "-m", "geonorm", "compare", *words], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        wait_for(lambda: len(list(out.glob("trials/*/result.json"))) >= 3 and bool(trial_processes(cache)), 900)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not trial_processes(cache))
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")}
    assert 3 <= len(stamps) < 12
    assert main(["compare", *words, "--resume"]) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert outcomes(out) == local


@pytest.mark.slow
def test_a_trial_that_is_always_killed_fails_after_its_retries(address, cache, data, tmp_path, monkeypatch, capsys):
    kills = []

    def progress(self, running):
        for process in trial_processes(cache):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                kills.append(process)

    monkeypatch.setattr(Display, "progress", progress)
    words = ["--steps", "3000", "--placements", "pre", *on_ray(address), "--retries", "1"]
    assert run_compare(tmp_path / "run", data, *words) == 1
    assert len(kills) == 2
    (trial,) = results_in(tmp_path / "run")["trials"]
    assert trial["status"] == "failed"
    assert trial["message"].startswith("the trial's process was killed by signal 9")
    assert "(attempt 2, on " in trial["message"]
    assert "not finished" not in capsys.readouterr().err


def test_a_trial_on_a_machine_that_does_not_see_the_corpus(address, cache, data, tmp_path, monkeypatch, capsys):
    """The fast one: one trial through a real cluster, its corpus sent in several pieces."""

    def hidden(path, key):
        return CorpusOffer("/nowhere/" + Path(path).name, key)

    monkeypatch.setattr(remote, "CorpusOffer", hidden)
    monkeypatch.setattr("geonorm.experiments.corpus_transfer.PIECE_BYTES", 10_000)
    handlers, original = set(), Display.progress

    def progress(self, running):
        handlers.add(signal.getsignal(signal.SIGTERM))
        original(self, running)

    monkeypatch.setattr(Display, "progress", progress)
    before = signal.getsignal(signal.SIGTERM)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", *on_ray(address)) == 0
    assert "sending it through Ray" in capsys.readouterr().out
    # Ray puts a handler of its own there, which would leave trials running and say nothing.
    assert [getattr(handler, "__module__", None) for handler in handlers] == ["geonorm.signals"]
    assert signal.getsignal(signal.SIGTERM) is before
    (received,) = (path for path in (cache / "received").iterdir() if path.is_dir())
    key = corpus_key(received)
    assert received.name == key
    assert [key] == [corpus_key(path) for path in cache.iterdir() if (path / "description.json").exists()]
    (outcome,) = outcomes(tmp_path / "run").values()
    assert outcome["status"] == "ok"


def test_received_corpus_is_whole_or_absent(tmp_path, monkeypatch):
    corpus = small_corpus(tmp_path)
    monkeypatch.setenv("GEONORM_CACHE", str(tmp_path / "there"))
    monkeypatch.setattr("geonorm.experiments.corpus_transfer.PIECE_BYTES", 1000)
    key = corpus_key(corpus.path)
    assert key is not None
    assert find_corpus(CorpusOffer(str(corpus.path), key), bytes) == corpus.path
    assert find_corpus(CorpusOffer("/nowhere", key), bytes) is None
    pieces = tuple((path.name, tuple(read_pieces(path))) for path in sorted(corpus.path.iterdir()))
    flipped = tuple(
        (name, tuple(bytes([part[0] ^ 1]) + part[1:] for part in parts) if name == "train.tokens" else parts)
        for name, parts in pieces
    )
    with pytest.raises(UserError, match="arrived damaged"):
        find_corpus(CorpusOffer("/nowhere", key, flipped), bytes)
    assert not [path for path in (tmp_path / "there" / "received").iterdir() if path.is_dir()]
    found = find_corpus(CorpusOffer("/nowhere", key, pieces), bytes)
    assert found is not None
    assert {p.name: p.read_bytes() for p in found.iterdir()} == {p.name: p.read_bytes() for p in corpus.path.iterdir()}


def test_versions_that_differ_are_named():
    mine = {"geonorm": "0.1.0+aa", "torch": "2.13.0+cpu", "transformers": "5.24.0"}
    assert difference(dict(mine), mine) == ""
    assert difference({**mine, "torch": "2.13.0+cu130"}, mine) == ""
    assert difference({**mine, "torch": "2.12.0+cpu"}, mine) == "runs torch 2.12.0+cpu, this one 2.13.0+cpu"
    assert difference({**mine, "geonorm": "0.1.0+bb"}, mine) == "runs geonorm 0.1.0+bb, this one 0.1.0+aa"
    assert "has no geonorm" in difference(None, mine)


@pytest.mark.slow
def test_other_code_than_the_cluster_runs_is_refused(address, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("geonorm.experiments.cluster.code_version", lambda: "0.0.1+old")
    assert run_compare(tmp_path / "run", data, "--placements", "pre", *on_ray(address)) == 2
    error = capsys.readouterr().err
    assert "of the Ray cluster runs geonorm 0.1.0+" in error
    assert "this one 0.0.1+old; install the same on both" in error
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
            "`batch` 4 is not a multiple of 3 ranks",
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
        Cluster(ClusterOptions()).connect(print)


def test_gpus_decide_device_and_ranks():
    def resources(**options):
        plan = make_plan(CompareConfig(preset="tiny", executor="ray", **options))
        assert plan.cluster is not None
        return plan.cluster.resources

    assert resources() == Resources(1, "cpu", 1, "none")
    assert resources(gpus_per_trial=0.5) == Resources(1, "cuda", 1, "none")
    assert resources(gpus_per_trial=4, cpus_per_trial=8) == Resources(2, "cuda", 4, "ddp")
    assert resources(cpus_per_trial=4, ranks_per_trial=2, parallel="fsdp") == Resources(2, "cpu", 2, "fsdp")
    assert make_plan(CompareConfig(preset="tiny")).cluster is None


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_of_a_trial_find_what_one_process_finds(tmp_path, parallel):
    """On the CPU, by torch's launcher as inside a Ray task; ranks sum in another order, so results are close."""
    corpus = small_corpus(tmp_path)
    plan = make_plan(CompareConfig(preset="tiny", placements=("geonorm:learnable=true",), steps=6, width=16, length=16))
    (trial,) = plan.first_trials(CorpusKey(corpus.description["fingerprint"], corpus.vocab_size))
    results = {}
    for ranks in (1, 2):
        resources = Resources(ranks=ranks, parallel=parallel if ranks > 1 else "none")
        process = start_process(trial, tmp_path / f"{ranks}", corpus.path, resources)
        process.process.wait(900)
        results[ranks] = process.result()
        assert results[ranks]["status"] == "ok", process.reason()
    assert results[2]["num_parameters"] == results[1]["num_parameters"]
    assert results[2]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=PARALLEL_LOSS)
    one, two = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("1", "2"))
    assert len(one) == len(two)


@needs_proc
@pytest.mark.slow
def test_ranks_end_with_whoever_started_their_launcher(tmp_path):
    corpus = small_corpus(tmp_path)
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre",), steps=1_000_000))
    (trial,) = plan.first_trials(CorpusKey(corpus.description["fingerprint"], corpus.vocab_size))
    process = start_process(trial, tmp_path / "trial", corpus.path, Resources(ranks=2, parallel="ddp"))
    try:
        wait_for(lambda: (tmp_path / "trial" / "metrics.jsonl").exists(), 900)
        assert len(trial_processes(tmp_path)) == 3
    finally:
        process.close()
    wait_for(lambda: not trial_processes(tmp_path))
    process.process.wait()


def test_the_cause_is_told_from_the_launchers_words():
    launcher = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "=" * 60, "x FAILED", "=" * 60]
    assert last_words("\n".join(["[rank1]: RuntimeError: no room", *launcher])) == "RuntimeError: no room"
    assert last_words("\n".join(["error: the id 7", "error: the id 7", *launcher])) == "error: the id 7"
    assert last_words("Traceback\nValueError: 3\n") == "ValueError: 3"
    assert last_words("") == "no output"
