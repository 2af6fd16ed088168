"""Whole comparisons through the command line: results, resuming, faults, mistakes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from corpora import write_documents
from geonorm.cli import main
from geonorm.placements import available
from geonorm.sweep.display import Display
from geonorm.sweep.executors import Executor, TrialProcess
from geonorm.training import recipe
from geonorm.training.result import RunResult
from processes import trial_processes, wait_for

WORDS = ["steps=6", "model.hidden_size=16", "data.seq_len=16", "evaluation.windows=8"]
SMALL = [*WORDS, "--preset", "tiny"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEONORM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """One whole comparison through the command line: its folder and what it printed. Tests that change it copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    printed = io.StringIO()
    words = ["--lrs", "3e-3", "1e-2", "--no-refine", "--seeds", "0", "1", "2"]
    words += ["--placements", "geonorm:decay=sqrt,alpha=0.5", "pre"]
    with contextlib.redirect_stdout(printed):
        assert run_compare(out, data, *words, "--jobs", "2") == 0
    return out, printed.getvalue()


def results_in(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def run_compare(out: Path, data: Path, *words: str) -> int:
    return main(["compare", *SMALL, "--data", str(data), "--out", str(out), *words])


def test_results_of_a_whole_comparison(finished):
    out, _ = finished
    results = results_in(out)
    assert len(results["trials"]) == 2 * (2 + 2)
    for trial in results["trials"]:
        assert trial["status"] == "ok"
        assert 0 < trial["val_loss"] < math.log(257)
        assert trial["tokens"] == 6 * 4 * 16
        rows = [json.loads(line) for line in (out / "trials" / trial["id"] / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["val_loss"] == trial["val_loss"]
        assert 0 < trial["test_loss"] != trial["val_loss"]
    means = [row["test_loss_mean"] for row in results["summary"]]
    assert means == sorted(means)
    for row in results["summary"]:
        mine = [t for t in results["trials"] if t["label"] == row["label"]]
        assert row["best_lr"] == min((t for t in mine if t["seed"] == 0), key=lambda t: t["val_loss"])["lr"]
        reporting = [t for t in mine if t["lr"] == row["best_lr"] and t["seed"] != 0]
        assert row["num_seeds"] == len(reporting) == 2
        assert row["test_loss_mean"] == pytest.approx(np.mean([t["test_loss"] for t in reporting]))
        assert row["test_loss_ci"][0] <= row["test_loss_mean"] <= row["test_loss_ci"][1]
        assert row["ci_kind"] == "seeds and documents"
        assert (row["tuned"], row["verdict"]) == (False, None)
    assert results["rates"] == {
        "source": "searched",
        "refined": False,
        "selection_seed": 0,
        "reporting_seeds": [1, 2],
        "found": "",
        "inherited": [],
        "other_corpus": False,
    }
    corpus = results["corpus"]
    assert corpus["num_groups_test"] == corpus["num_documents_test"] >= 8
    assert 0 < corpus["largest_share_test"] <= 0.25
    assert 0 <= corpus["overlap_test"] <= 1
    assert results["environment"]["threads_per_trial"] == 1
    assert results["trials"][0]["options"] == {"decay": "sqrt", "alpha": 0.5}
    resolved = recipe.read_file(out / "config.yaml")
    assert resolved["settings"]["model"]["hidden_size"] == 16
    assert resolved["compare"]["seeds"] == [0, 1, 2]
    options = {
        recipe.read_file(path)["model"]["options"].get("retraction") for path in out.glob("trials/geo*/config.yaml")
    }
    assert options == {"exponential"}


def test_page_and_printed_lines_of_a_whole_comparison(finished):
    out, printed = finished
    best = results_in(out)["summary"][0]["test_loss_mean"]
    assert f"{best:.3f}" in (out / "report.html").read_text()
    assert f"{best:.3f}" in printed
    assert list((out / "figures").glob("*.svg"))
    assert "[8/8] " in printed
    assert "report:" in printed
    assert "\x1b" not in printed


def test_the_recorded_command_repeats_every_bit_with_another_number_of_jobs(finished, tmp_path):
    out, _ = finished
    command = shlex.split(results_in(out)["command"])
    assert command[0] == "geonorm"
    command[command.index("--out") + 1] = str(tmp_path / "two")
    assert main([*command[1:], "--jobs", "3"]) == 0
    one, two = (results_in(folder)["trials"] for folder in (out, tmp_path / "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert mine["id"] == theirs["id"]
        assert (mine["val_loss"], mine["train_loss"]) == (theirs["val_loss"], theirs["train_loss"])


def resume_words(out: Path) -> list[str]:
    command = shlex.split(results_in(out)["command"])[1:]
    return [*command, "--resume"]


def copied(finished, tmp_path) -> tuple[Path, list[str]]:
    """A copy of the finished comparison and the command line that resumes it."""
    out = tmp_path / "run"
    words = resume_words(finished[0])
    shutil.copytree(finished[0], out)
    words[words.index("--out") + 1] = str(out)
    return out, words


def test_resume_keeps_what_is_finished_and_adds_what_is_new(finished, tmp_path, capsys):
    out, words = copied(finished, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")}
    assert main([word for word in words if word != "--resume"]) == 2
    assert "is not empty; add --resume" in capsys.readouterr().err
    words[words.index("pre")] = "post"
    for name, values in (("--lrs", ["3e-3"]), ("--seeds", ["0"])):
        start = words.index(name) + 1
        end = next(i for i in range(start, len(words)) if words[i].startswith("--"))
        words[start:end] = values
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert [t["placement"] for t in results_in(out)["trials"]] == ["geonorm", "post"]


def test_resume_with_other_settings_is_refused_and_loses_nothing(finished, tmp_path, capsys):
    out, words = copied(finished, tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main([words[0], "global_batch_size=8", *words[1:]]) == 2
    assert "`global_batch_size` is 8 now but was 4" in capsys.readouterr().err
    words[words.index("--data") + 1] = str(write_documents(tmp_path / "other", seed=1))
    assert main(words) == 2
    assert "`data` is this text now but was other text" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_comparison_of_another_version_is_not_resumed(finished, tmp_path, capsys):
    out, words = copied(finished, tmp_path)
    config = recipe.read_file(out / "config.yaml")
    del config["format"]
    (out / "config.yaml").write_text(recipe.dump_data(config))
    assert main(words) == 2
    assert "holds a comparison of another version of geonorm; name another folder" in capsys.readouterr().err


def test_a_search_goes_on_until_the_best_rate_has_neighbours(tmp_path, data, monkeypatch):
    """With made-up results: the grid, its refinements, then the seeds that report."""

    def run(self, trials, root):
        results = []
        for trial in trials:
            loss = 3 + abs(math.log(trial.lr / 6e-3)) + 0.01 * trial.seed
            ended = RunResult(status="ok", val_loss=loss, test_loss=loss, test_bits_per_byte=loss)
            results.append(trial.result(ended))
            (root / trial.id).mkdir()
            self.on_finish(trial, results[-1])
        return results

    monkeypatch.setattr(Executor, "run", run)
    words = ["--placements", "pre", "post", "--lrs", "4e-3", "8e-3", "1.6e-2", "--seeds", "0", "1", "2", "3"]
    assert run_compare(tmp_path / "run", data, *words) == 0
    results = results_in(tmp_path / "run")
    for row in results["summary"]:
        assert (row["best_lr"], row["tuned"], row["num_seeds"]) == (5.66e-3, True, 3)
        assert row["lrs_tried"] == [4e-3, 5.66e-3, 8e-3, 1.13e-2, 1.6e-2]
        assert row["test_loss_mean"] == pytest.approx(3.02 + abs(math.log(5.66 / 6)))
    assert results["rates"]["refined"]
    assert [trial["seed"] for trial in results["trials"]] == [0] * 10 + [1, 1, 2, 2, 3, 3]


def test_a_folder_with_something_else_is_left_alone(tmp_path, data, capsys):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    assert run_compare(tmp_path, data, "--resume") == 2
    assert "holds no comparison" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_trial_is_reported_and_the_rest_go_on(tmp_path, data, monkeypatch, capsys):
    original = Executor.start

    def start(self, folder):
        if folder.name.startswith("post"):
            folder.mkdir()
            (folder / "notes.txt").write_text("in the way")
        return original(self, folder)

    monkeypatch.setattr(Executor, "start", start)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", "post") == 1
    trials = {t["placement"]: t for t in results_in(tmp_path / "run")["trials"]}
    assert trials["pre"]["status"] == "ok"
    assert trials["post"]["status"] == "failed"
    assert "holds no training run" in trials["post"]["message"]
    assert Path(trials["post"]["message"].rpartition("see ")[2]).exists()
    assert "failed" in capsys.readouterr().out
    monkeypatch.undo()


def test_a_killed_trial_names_the_signal(tmp_path, data, monkeypatch):
    original = Executor.start

    def start(self, folder):
        handle = original(self, folder)
        os.kill(handle.process.pid, signal.SIGKILL)
        return handle

    monkeypatch.setattr(Executor, "start", start)
    assert run_compare(tmp_path / "run", data, "--placements", "pre") == 1
    assert "killed by signal 9" in results_in(tmp_path / "run")["trials"][0]["message"]
    assert results_in(tmp_path / "run")["summary"][0]["test_loss_mean"] is None


def test_an_interrupt_ends_every_process(tmp_path, data, monkeypatch, capsys):
    started = []

    def interrupt(self, running):
        started.append(running.handle.process)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("geonorm.sweep.display.Display.start", interrupt)
    assert run_compare(tmp_path / "run", data, "--jobs", "2") == 130
    captured = capsys.readouterr()
    assert "--resume" in captured.out
    assert captured.err == "interrupted\n"
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_a_comparison_that_is_killed_leaves_no_process(tmp_path, data):
    """SIGKILL cannot be caught, so the trials have to notice by themselves."""
    words = ["steps=1000000", *SMALL[1:], "--data", str(data), "--out", str(tmp_path / "run"), "--jobs", "2"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "geonorm", "compare", *words], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        wait_for(lambda: len(trial_processes(tmp_path)) == 2, 600)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not trial_processes(tmp_path))


def test_a_diverged_trial_is_a_result(tmp_path, data):
    assert run_compare(tmp_path / "run", data, "--placements", "pre", "--lrs", "3e-3", "1000", "--no-refine") == 0
    results = results_in(tmp_path / "run")
    statuses = {t["lr"]: t["status"] for t in results["trials"]}
    # Which of the two it is may depend on the processor; that it is lost does not.
    assert statuses.pop(1000.0) in ("diverged", "unlearned")
    assert set(statuses.values()) == {"ok"}
    assert results["summary"][0]["best_lr"] in statuses


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placements", "gonorm"], "unknown placement 'gonorm'; did you mean 'geonorm'? (known: "),
        (["--placements", "geonorm:alpha=-0.1"], "`alpha` must be positive, got -0.1"),
        (["--placements", "geonorm:decay"], "option 'decay' of placement 'geonorm' has no value"),
        (["--placements", "pre", "pre"], "`compare.placements` has pre twice"),
        (["--placements", "pre:normalize_entry=false", "pre"], "`compare.placements` has pre twice"),
        (["--preset", "hug"], "unknown preset 'hug'"),
        (["model.hidden_size=30", "model.num_heads=4"], "`hidden_size` 30 is not divisible by `num_heads` 4"),
        (["model.hidden_size=12", "model.num_heads=4"], "rotary positions need an even head size"),
        (["--lrs", "-1e-3"], "`lrs` must be positive, got -0.001"),
        (["--seeds", "1", "1"], "`compare.seeds` has 1 twice"),
        (["--jobs", "0"], "`jobs` must be a whole number of at least 1"),
        (["precision=fp8"], "unknown value of `precision` 'fp8'"),
        (["data.vocab_size=100"], "`vocab_size` must be a whole number of at least 257"),
        (["data.vocab_size=0"], "`data.vocab_size` must be a whole number of at least 1"),
        (["--placements", "geonorm:retraction=inf"], "write 'exponential'"),
        (["data.seq_len=100000"], "use a shorter length or more text"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["steps"], "override 'steps' is not KEY=VALUE"),
        (["sptes=3"], "unknown key 'sptes'; did you mean 'steps'?"),
        (["--vary", "optimizer.name"], "`vary` must be KEY=A,B"),
        (["--vary", "optimizer.name=adamw,sgd"], "unknown value of `optimizer.name` 'sgd'"),
        (["--address", "auto"], "`address` is for Ray; add --executor ray"),
        (["--ranks-per-trial", "3"], "`global_batch_size` 4 is not a multiple of 3 ranks times `accumulation` 1"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(tmp_path, data, words, message, capsys):
    out = tmp_path / "run"
    own, options = (words, []) if not words[0].startswith("-") else ([], words)
    if "--data" not in words:
        options = [*options, "--data", str(data)]
    assert main(["compare", *WORDS, *own, "--preset", "tiny", "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out.exists()


def test_empty_data(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert main(["compare", *SMALL, "--data", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "run")]) == 2
    assert "empty.txt" in capsys.readouterr().err


def test_misspelt_option_exits_with_2_and_suggests(capsys):
    with pytest.raises(SystemExit) as error:
        main(["compare", "--sedes", "3"])
    assert error.value.code == 2
    assert "--seeds" in capsys.readouterr().err


def test_missing_extra_names_the_remedy():
    code = "import sys; sys.modules['tyro'] = None; from geonorm.cli import main; sys.exit(main(['placements']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: tyro is not installed; run pip install 'geonorm[train]'\n"


def test_listing_placements(capsys):
    assert main(["placements"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in available())
    assert "decay=harmonic" in printed


def test_report_of_a_folder_without_results(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_results_are_whole_after_every_trial(tmp_path, data, monkeypatch):
    seen = []
    original = Display.finish

    def finish(self, trial, result):
        if seen:
            seen.append(results_in(tmp_path / "run"))
        seen.append(None)
        original(self, trial, result)

    monkeypatch.setattr(Display, "finish", finish)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", "post", "--jobs", "1") == 0
    halfway = seen[1]
    assert [trial["placement"] for trial in halfway["trials"]] == ["pre"]
    assert not halfway["complete"]
    assert results_in(tmp_path / "run")["complete"]


def test_trials_stand_in_the_order_of_the_plan_whatever_ends_first(finished, tmp_path, monkeypatch):
    out, words = copied(finished, tmp_path)
    before = [trial["id"] for trial in results_in(out)["trials"]]
    original = Executor.run

    def backwards(self, trials, root):
        return original(self, trials[::-1], root)[::-1]

    monkeypatch.setattr(Executor, "run", backwards)
    assert main(words) == 0
    assert [trial["id"] for trial in results_in(out)["trials"]] == before


def test_two_processes_do_not_share_a_folder(finished, tmp_path, capsys):
    out, words = copied(finished, tmp_path)
    with FileLock(out / ".lock"):
        assert main(words) == 2
    assert "another process is running a comparison" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, data, capsys):
    (tmp_path / "file").write_text("")
    assert run_compare(tmp_path / "file" / "run", data) == 2
    assert "is or lies in a file" in capsys.readouterr().err


def test_an_error_of_the_disk_is_one_line(tmp_path, data, monkeypatch, capsys):
    def full(self, trials, root):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))

    monkeypatch.setattr(Executor, "run", full)
    assert run_compare(tmp_path / "run", data) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: No space left on device (")
    assert error.count("\n") == 1


def test_a_finished_result_of_other_options_is_never_overwritten(finished, tmp_path, capsys):
    """A default that changes between two releases gives the same folder name and another trial."""
    out, words = copied(finished, tmp_path)
    folder = next(out.glob("trials/pre-*"))
    config = recipe.read_file(folder / "config.yaml")
    config["model"]["options"]["normalize_entry"] = True
    (folder / "config.yaml").write_text(recipe.dump_data(config))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(words) == 2
    assert "holds the result of a trial with other settings or defaults" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_trial_that_is_killed_goes_on_from_its_checkpoint(tmp_path, data, monkeypatch):
    words = ["steps=60", *WORDS[1:], "checkpoint.every=20", "evaluation.log_every=1", "--preset", "tiny"]
    words += ["--data", str(data), "--placements", "geonorm", "--seeds", "0"]
    assert main(["compare", *words, "--out", str(tmp_path / "whole")]) == 0
    original = TrialProcess.failure

    def failure(self):
        if (self.folder / "checkpoints" / "step-40").exists():
            self.process.kill()
        return original(self)

    monkeypatch.setattr(TrialProcess, "failure", failure)
    assert main(["compare", *words, "--out", str(tmp_path / "killed")]) == 1
    assert "killed by signal 9" in results_in(tmp_path / "killed")["trials"][0]["message"]
    monkeypatch.undo()
    monkeypatch.setenv("GEONORM_CACHE", os.environ["GEONORM_CACHE"])
    assert main(["compare", *words, "--out", str(tmp_path / "killed"), "--resume"]) == 0
    (one,), (two,) = (results_in(tmp_path / name)["trials"] for name in ("whole", "killed"))
    clock = ("seconds", "tokens_per_second", "peak_memory_bytes")
    assert {k: v for k, v in one.items() if k not in clock} == {k: v for k, v in two.items() if k not in clock}
    log = (tmp_path / "killed" / "trials" / f"{one['id']}.log").read_text()
    assert "going on from step 40" in log
    windows = [
        (tmp_path / name / "trials" / one["id"] / "test_windows.json").read_bytes() for name in ("whole", "killed")
    ]
    assert windows[0] == windows[1]


@pytest.mark.slow
def test_keys_are_varied_with_all_that_train_can_do(tmp_path, data):
    vary = ["optimizer.name=adamw,muon", "schedule.name=cosine,wsd", "model.family=llama,gpt2"]
    words = ["--placements", "geonorm", "pre", "--seeds", "0", "--jobs", "2", "--vary", *vary]
    assert run_compare(tmp_path / "run", data, *words) == 0
    results = results_in(tmp_path / "run")
    assert len(results["variants"]) == 8
    assert {variant["reference"] for variant in results["variants"]} == {"pre"}
    assert len(results["trials"]) == 16
    assert len({trial["val_loss"] for trial in results["trials"]}) == 16
    page = (tmp_path / "run" / "report.html").read_text()
    assert "muon" in page
    assert "gpt2" in page


@pytest.mark.slow
def test_all_trials_of_a_comparison_take_the_step_that_the_first_took(data, tmp_path, monkeypatch, capsys):
    """Kernels are built before the first trial; a comparison that was begun without them goes on without them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("geonorm.ops.cpp._refusal", None)
    words = ["--placements", "geonorm", "--jobs", "1"]

    def steps(out):
        return [trial["step_impl"] for trial in results_in(out)["trials"]]

    monkeypatch.setenv("GEONORM_CPP", "0")
    assert run_compare(tmp_path / "without", data, *words, "--seeds", "0") == 0
    monkeypatch.delenv("GEONORM_CPP")
    assert run_compare(tmp_path / "with", data, *words, "--seeds", "0", "1") == 0
    assert "building the C++ kernels of the step, once for this machine" in capsys.readouterr().err
    assert steps(tmp_path / "with") == ["cpp", "cpp"]
    assert run_compare(tmp_path / "without", data, *words, "--seeds", "0", "1", "--resume") == 0
    assert steps(tmp_path / "without") == ["autograd", "autograd"]
