"""Whole comparisons through the command line: results, resuming, axes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from comparisons import results_in, run_compare
from corpora import write_documents
from geonorm.cli import main
from geonorm.placements import available
from geonorm.sweep.display import Display
from geonorm.sweep.executors import Executor
from geonorm.training import recipe
from geonorm.training.result import RunResult


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


def test_listing_placements(capsys):
    assert main(["placements"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in available())
    assert "decay=harmonic" in printed


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
