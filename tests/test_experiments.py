"""Plans, the executor, statistics, and whole comparisons through the command line."""

from __future__ import annotations

import contextlib
import dataclasses
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
import yaml
from filelock import FileLock

from corpora import write_documents
from geonorm import UserError
from geonorm.cli import main
from geonorm.experiments import CompareConfig
from geonorm.experiments.display import Display
from geonorm.experiments.local import LocalExecutor
from geonorm.experiments.plan import CorpusKey, make_plan
from geonorm.experiments.presets import PRESETS
from geonorm.experiments.statistics import best_lr, bootstrap_interval, summarize, t_interval
from geonorm.experiments.trials import ModelShape, Trial, folder_holds_another, read_result
from geonorm.placements import available
from geonorm.storage import write_json

SMALL = ["--preset", "tiny", "--steps", "6", "--width", "16", "--length", "16", "--eval-windows", "8"]


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
    words = ["--lrs", "3e-3", "1e-2", "--seeds", "0", "1", "--placements", "geonorm:decay=sqrt,alpha=0.5", "pre"]
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
    assert len(results["trials"]) == 2 * (2 + 1)
    for trial in results["trials"]:
        assert trial["status"] == "ok"
        assert 0 < trial["val_loss"] < math.log(257)
        assert trial["tokens"] == 6 * 4 * 16
        rows = [json.loads(line) for line in (out / "trials" / trial["id"] / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["val_loss"] == trial["val_loss"]
    means = [row["val_loss_mean"] for row in results["summary"]]
    assert means == sorted(means)
    for row in results["summary"]:
        chosen = [t for t in results["trials"] if t["label"] == row["label"] and t["lr"] == row["best_lr"]]
        assert row["num_seeds"] == len(chosen) == 2
        assert row["val_loss_mean"] == pytest.approx(np.mean([t["val_loss"] for t in chosen]))
        assert row["val_loss_ci"][0] <= row["val_loss_mean"] <= row["val_loss_ci"][1]
        assert row["ci_kind"] == "seeds"
    assert results["environment"]["threads_per_trial"] == 1
    assert results["trials"][0]["options"] == {"decay": "sqrt", "alpha": 0.5}
    resolved = yaml.safe_load((out / "config.yaml").read_text())
    assert resolved["settings"]["width"] == 16
    assert resolved["placements"][0]["options"]["retraction"] == "exponential"


def test_page_and_printed_lines_of_a_whole_comparison(finished):
    out, printed = finished
    best = results_in(out)["summary"][0]["val_loss_mean"]
    assert f"{best:.3f}" in (out / "report.html").read_text()
    assert f"{best:.3f}" in printed
    assert list((out / "figures").glob("*.svg"))
    assert "[6/6] " in printed
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
    assert main([*words, "--batch", "8"]) == 2
    assert "`batch` is 8 now but was 4" in capsys.readouterr().err
    words[words.index("--data") + 1] = str(write_documents(tmp_path / "other", seed=1))
    assert main(words) == 2
    assert "`data` is this text now but was other text" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_with_something_else_is_left_alone(tmp_path, data, capsys):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    assert run_compare(tmp_path, data, "--resume") == 2
    assert "holds no comparison" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_trial_is_reported_and_the_rest_go_on(tmp_path, data, monkeypatch, capsys):
    original = LocalExecutor._start

    def start(self, trial, folder, corpus):
        return original(self, trial, folder, corpus if trial.placement != "post" else corpus / "missing")

    monkeypatch.setattr(LocalExecutor, "_start", start)
    assert run_compare(tmp_path / "run", data, "--placements", "pre", "post") == 1
    trials = {t["placement"]: t for t in results_in(tmp_path / "run")["trials"]}
    assert trials["pre"]["status"] == "ok"
    assert trials["post"]["status"] == "failed"
    assert "log.txt" in trials["post"]["message"]
    assert Path(trials["post"]["message"].rpartition("see ")[2]).exists()
    assert "failed" in capsys.readouterr().out
    monkeypatch.undo()


def test_a_killed_trial_names_the_signal(tmp_path, data, monkeypatch):
    original = LocalExecutor._start

    def start(self, trial, folder, corpus):
        running = original(self, trial, folder, corpus)
        os.kill(running.process.pid, signal.SIGKILL)
        return running

    monkeypatch.setattr(LocalExecutor, "_start", start)
    assert run_compare(tmp_path / "run", data, "--placements", "pre") == 1
    assert "killed by signal 9" in results_in(tmp_path / "run")["trials"][0]["message"]
    assert results_in(tmp_path / "run")["summary"][0]["val_loss_mean"] is None


def test_an_interrupt_ends_every_process(tmp_path, data, monkeypatch, capsys):
    started = []

    def interrupt(self, running):
        started.append(running.process)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("geonorm.experiments.display.Display.start", interrupt)
    assert run_compare(tmp_path / "run", data, "--jobs", "2") == 130
    captured = capsys.readouterr()
    assert "--resume" in captured.out
    assert captured.err == "interrupted\n"
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_diverged_trial_is_a_result(tmp_path, data):
    assert run_compare(tmp_path / "run", data, "--placements", "pre", "--lrs", "3e-3", "1000") == 0
    results = results_in(tmp_path / "run")
    assert {t["lr"]: t["status"] for t in results["trials"]} == {3e-3: "ok", 1000.0: "diverged"}
    assert (results["summary"][0]["best_lr"], results["summary"][0]["num_diverged"]) == (3e-3, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placements", "gonorm"], "unknown placement 'gonorm'; did you mean 'geonorm'? (known: "),
        (["--placements", "geonorm:alpha=-0.1"], "`alpha` must be positive, got -0.1"),
        (["--placements", "geonorm:decay"], "option 'decay' of placement 'geonorm' has no value"),
        (["--placements", "pre", "pre"], "`placements` has pre twice"),
        (["--preset", "hug"], "unknown preset 'hug'"),
        (["--width", "30", "--heads", "4"], "`width` 30 is not divisible by `heads` 4"),
        (["--width", "12", "--heads", "4"], "rotary positions need an even head size"),
        (["--lrs", "-1e-3"], "`lrs` must be positive, got -0.001"),
        (["--seeds", "1", "1"], "`seeds` has 1 twice"),
        (["--jobs", "0"], "`jobs` must be a whole number of at least 1"),
        (["--precision", "fp8"], "`precision` must be 'fp32' or 'bf16'"),
        (["--vocab-size", "100"], "`vocab_size` must be a whole number of at least 257"),
        (["--vocab-size", "0"], "`vocab_size` must be a whole number of at least 257"),
        (["--placements", "geonorm:retraction=inf"], "write 'exponential'"),
        (["--length", "100000"], "use a shorter length or more text"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(tmp_path, data, words, message, capsys):
    out = tmp_path / "run"
    base = SMALL if "--data" in words else [*SMALL, "--data", str(data)]
    assert main(["compare", *base, "--out", str(out), *words]) == 2
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
        main(["compare", "--stpes", "3"])
    assert error.value.code == 2
    assert "--steps" in capsys.readouterr().err


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


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_plans(name):
    plan = make_plan(CompareConfig(preset=name))
    trials = plan.first_trials(CorpusKey("f", 300))
    assert {trial.placement for trial in trials} == set(available())
    assert {trial.vocab_size for trial in trials} == {300}
    assert len({trial.id for trial in trials}) == len(trials)
    for trial in trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
    for parts in (("geonorm", "decay=sqrt"), ("pre", "normalize_entry=true")):
        plan = make_plan(CompareConfig(preset=name, placements=(":".join(parts),)))
        assert plan.rates[0]


def test_one_seed_chooses_the_rate_and_the_others_follow():
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre", "post"), lrs=(1e-3, 2e-3, 4e-3), seeds=(5, 6, 7)))
    first = plan.first_trials(CorpusKey("f", 257))
    assert {t.training.seed for t in first} == {5}
    assert len(first) == 6
    losses = {("pre", 1e-3): 3.0, ("pre", 2e-3): 2.0, ("pre", 4e-3): 2.5}
    results = [
        {
            "label": t.label,
            "lr": t.training.lr,
            "seed": 5,
            "val_loss": losses.get((t.placement, t.training.lr)),
            "status": "ok" if t.placement == "pre" else "diverged",
        }
        for t in first
    ]
    later = plan.later_trials(results, CorpusKey("f", 257))
    assert [(t.placement, t.training.lr, t.training.seed) for t in later] == [("pre", 2e-3, 6), ("pre", 2e-3, 7)]
    grid = make_plan(CompareConfig(preset="tiny", lrs=(1e-3, 2e-3), seeds=(0, 1), full_grid=True))
    assert len(grid.first_trials(CorpusKey("f", 257))) == 5 * 2 * 2
    assert grid.later_trials([], CorpusKey("f", 257)) == []


def trial_result(label: str, lr: float, seed: int, loss: float | None, status: str = "ok") -> dict:
    return {
        "id": f"{label}-{lr}-{seed}",
        "label": label,
        "placement": label,
        "options": {},
        "lr": lr,
        "seed": seed,
        "val_loss": loss,
        "val_bits_per_byte": None if loss is None else loss / 2,
        "status": status,
    }


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"preset": "small"}, "searched"),
        ({"preset": "tiny"}, "untuned"),
        ({"preset": "tiny", "lrs": (1e-3,)}, "given"),
        ({"preset": "tiny", "lrs": (1e-3, 2e-3)}, "searched"),
        ({"preset": "demo"}, "tuned"),
    ],
)
def test_where_the_rates_come_from(changes, source):
    assert make_plan(CompareConfig(**changes)).rate_source() == source


def test_a_preset_without_a_rate_for_a_placement_asks_for_one(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], lrs={"pre": (1e-3,)}))
    with pytest.raises(UserError, match="no learning rate for placement 'post'; give --lrs"):
        make_plan(CompareConfig(preset="tiny", placements=("post",)))
    assert make_plan(CompareConfig(preset="tiny", placements=("post",), lrs=(1e-3,))).rates == ((1e-3,),)


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
    assert "The comparison is not finished: 1 of 2 trials have ended." in halfway["notes"]
    assert not any("not finished" in note for note in results_in(tmp_path / "run")["notes"])


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
    def full(self, trials, root, corpus):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))

    monkeypatch.setattr(LocalExecutor, "run", full)
    assert run_compare(tmp_path / "run", data) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: No space left on device (")
    assert error.count("\n") == 1


def test_best_rate_compares_shared_seeds_only():
    trials = [
        trial_result("pre", 1e-3, 0, 2.0),
        trial_result("pre", 2e-3, 0, 2.1),
        trial_result("pre", 1e-3, 1, 9.0),
        trial_result("pre", 4e-3, 0, None, "diverged"),
    ]
    assert best_lr(trials) == 1e-3
    assert best_lr(trials[3:]) is None
    assert best_lr([]) is None


def test_a_row_that_lost_a_seed_says_so_and_does_not_lead(tmp_path):
    """Whether one rate or several were tried: the survivors' mean is shown, marked, below every whole row."""
    trials = [trial_result("pre", 1e-3, seed, 2.0 + seed / 10) for seed in range(3)]
    trials += [trial_result("post", 1e-3, seed, loss) for seed, loss in ((0, 1.8), (1, 1.81))]
    trials += [trial_result("post", 1e-3, 2, None, "diverged")]
    trials += [trial_result("sandwich", lr, 0, loss) for lr, loss in ((1e-3, 1.7), (2e-3, 1.9))]
    trials += [trial_result("sandwich", 1e-3, 1, None, "diverged"), trial_result("sandwich", 1e-3, 2, 1.72)]
    rows = summarize(trials, tmp_path)
    assert [row["label"] for row in rows] == ["pre", "sandwich", "post"]
    assert [(row["num_seeds"], row["num_lost"]) for row in rows] == [(3, 0), (2, 1), (2, 1)]
    assert rows[1]["val_loss_mean"] == pytest.approx(1.71)
    assert rows[2]["val_loss_mean"] == pytest.approx(1.805)


def test_a_rate_that_diverges_less_is_chosen_first():
    trials = [trial_result("pre", 1e-3, seed, 2.0) for seed in range(2)]
    trials += [trial_result("pre", 2e-3, 0, 1.5), trial_result("pre", 2e-3, 1, None, "diverged")]
    assert best_lr(trials) == 1e-3
    assert best_lr(trials[2:]) == 2e-3


def test_summary_over_seeds(tmp_path):
    pre, geo = [2.0, 2.1, 1.9], [1.9, 2.05, 1.8]
    trials = [trial_result("pre", 1e-3, seed, loss) for seed, loss in enumerate(pre)]
    trials += [trial_result("geonorm", 1e-3, seed, loss) for seed, loss in enumerate(geo)]
    trials += [trial_result("post", 1e-3, seed, None, "failed") for seed in range(3)]
    rows = summarize(trials, tmp_path)
    assert [row["label"] for row in rows] == ["geonorm", "pre", "post"]
    # Student t with 2 degrees of freedom: 4.302653 times the standard error, worked by hand.
    spread = 4.302653 * math.sqrt(0.01 / 3)
    assert rows[1]["val_loss_ci"] == pytest.approx([2.0 - spread, 2.0 + spread], rel=1e-5)
    differences = np.array(geo) - np.array(pre)
    spread = 4.302653 * differences.std(ddof=1) / math.sqrt(3)
    assert rows[0]["difference"]["mean"] == pytest.approx(differences.mean())
    assert rows[0]["difference"]["ci"] == pytest.approx([differences.mean() - spread, differences.mean() + spread])
    assert rows[0]["difference"]["kind"] == "paired seeds"
    assert rows[1]["difference"] is None
    assert rows[2]["val_loss_mean"] is None
    assert rows[2]["num_failed"] == 3


def test_summary_of_one_seed_is_over_windows(tmp_path):
    generator = np.random.default_rng(0)
    shared = generator.normal(2.0, 0.5, 300)
    for label, losses in (("pre", shared), ("geonorm", shared - 0.1 + generator.normal(0, 0.01, 300))):
        folder = tmp_path / f"{label}-0.001-0"
        folder.mkdir()
        write_json(folder / "window_losses.json", losses.tolist())
    rows = summarize([trial_result("pre", 1e-3, 0, 2.0), trial_result("geonorm", 1e-3, 0, 1.9)], tmp_path)
    assert all(row["ci_kind"] == "windows" for row in rows)
    wide = rows[0]["val_loss_ci"][1] - rows[0]["val_loss_ci"][0]
    narrow = rows[0]["difference"]["ci"][1] - rows[0]["difference"]["ci"][0]
    assert wide == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(300), rel=0.2)
    assert narrow < wide / 20
    assert rows[0]["difference"]["ci"][1] < 0


def test_reference_is_the_best_variant_of_pre(tmp_path):
    variants = [
        {**trial_result(f"pre({number})", 1e-3, 0, loss), "placement": "pre", "options": {"normalize_entry": True}}
        for number, loss in enumerate((2.2, 2.1))
    ]
    geonorm = trial_result("geonorm", 1e-3, 0, 2.0)
    rows = summarize([*variants, geonorm], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre(1)"
    rows = summarize([*variants, geonorm, trial_result("pre", 1e-3, 0, 3.0)], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre(1)"
    rows = summarize([*variants, geonorm, trial_result("pre", 1e-3, 0, 2.05)], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre"
    assert summarize([geonorm], tmp_path)[0]["difference"] is None


def test_intervals_at_the_edges():
    assert t_interval([1.0]) is None
    assert t_interval([1.0, 1.0]) == [1.0, 1.0]
    assert bootstrap_interval(np.array([1.0])) is None
    assert bootstrap_interval(np.ones(5)) is None
    values = np.arange(50.0)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_results_of_another_trial_are_not_kept(tmp_path):
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre",)))
    trial, other = plan.first_trials(CorpusKey("f", 257))[0], plan.first_trials(CorpusKey("g", 257))[0]
    write_json(tmp_path / "trial.json", trial.to_json())
    assert read_result(tmp_path, trial) is None
    write_json(tmp_path / "result.json", {"status": "ok"})
    assert read_result(tmp_path, trial) == {"status": "ok"}
    assert read_result(tmp_path, other) is None
    assert not folder_holds_another(tmp_path, trial)
    assert folder_holds_another(tmp_path, other)
    (tmp_path / "result.json").write_text('{"status": "o')
    assert read_result(tmp_path, trial) is None


def test_a_finished_result_of_other_options_is_never_overwritten(finished, tmp_path, monkeypatch):
    """A default that changes between two releases gives the same folder name and another trial."""
    out, _ = copied(finished, tmp_path)
    folder = next(out.glob("trials/pre-*"))
    spec = json.loads((folder / "trial.json").read_text())
    trial = Trial.from_json({**spec, "options": {"normalize_entry": True}})
    (folder.parent / trial.id).mkdir(exist_ok=True)
    shutil.copytree(folder, folder.parent / trial.id, dirs_exist_ok=True)
    with pytest.raises(UserError, match="holds the result of a trial with other settings or defaults"):
        LocalExecutor(1).run([trial], out / "trials", out)
    assert json.loads((folder.parent / trial.id / "trial.json").read_text()) == spec


def test_ids_tell_close_rates_apart():
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre",), lrs=(1e-3, 1.0000001e-3)))
    assert len({trial.id for trial in plan.first_trials(CorpusKey("f", 257))}) == 2


def test_model_shape():
    assert ModelShape(width=128).inner == 344
    assert ModelShape(width=128, mlp_width=512).inner == 512
