"""What a closed, full or stopped console and any signal change about a command: nothing but what is seen there."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geonorm.cli import main
from geonorm.console import Steady, drain, steady
from geonorm.signals import stop_requests
from geonorm.training.recipe import dump
from processes import trial_processes, wait_for
from train_runs import rows, tiny, tiny_corpus

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
COMMAND = [sys.executable, "-m", "geonorm"]
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "recipe.yaml"
    path.write_text(dump(tiny(tiny_corpus(folder / "corpus"))))
    return path


def train_words(recipe: Path, out: Path, *words: str) -> list[str]:
    return [*COMMAND, "train", "--config", str(recipe), "--out", str(out), *words]


def closed() -> None:
    for number in range(3):
        os.close(number)


@pytest.mark.parametrize("console", ["closed pipe", "closed descriptors", "full disk", "nobody reads", "ASCII"])
def test_a_console_that_is_gone_changes_nothing_of_a_run(recipe, tmp_path, console):
    reader, writer = os.pipe()
    options: dict = {"stdout": writer, "stderr": writer, "env": ENVIRONMENT}
    words = train_words(recipe, tmp_path / "é" / "run")
    if console == "closed pipe":
        os.close(reader)
    elif console == "closed descriptors":
        options = {"preexec_fn": closed, "env": ENVIRONMENT}
    elif console == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    elif console == "ASCII":
        options["env"] = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    else:
        # More than a pipe holds, so that whoever waits for its reader waits for ever.
        words += ["sampling.every=1", "sampling.tokens=40", "sampling.prompts=[" + ",".join(["Ada"] * 12) + "]"]
    done = subprocess.run(words, **options, timeout=300)
    assert done.returncode == 0
    assert [row["step"] for row in rows(tmp_path / "é" / "run")] == list(range(1, 31))
    assert (tmp_path / "é" / "run" / "result.json").exists()
    os.close(writer)
    if console == "ASCII":
        assert b"\\xe9" in os.read(reader, 1 << 16)
    if console != "closed pipe":
        os.close(reader)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_command_whose_result_is_what_it_prints_says_that_it_could_not():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "placements"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: No space left on device")


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "placements"], stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_said_arrives_in_order_whatever_its_characters(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with steady():
            assert isinstance(sys.stdout, Steady)
            assert sys.stdout.encoding == "latin-1"
            for number in range(100):
                print(f"{number} é \N{GREEK SMALL LETTER ALPHA} \udce9")
            drain()
            lines = os.read(reader, 1 << 16).decode("latin-1").splitlines()
        assert sys.stdout is stream
    os.close(reader)
    assert lines == [f"{number} é \\u03b1 \\udce9" for number in range(100)]


def test_streams_without_a_descriptor_are_written_to_at_once(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with steady():
        print("said")
        assert stream.getvalue() == "said\n"
        monkeypatch.setattr(stream, "write", lambda text: 1 / 0 if text == "never" else None)
        stream.close()
        print("into the void")


def send(process: subprocess.Popen, numbers: list[int]) -> None:
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)


def wait_for_line(process: subprocess.Popen, part: str) -> None:
    assert process.stdout is not None
    assert any(part in line for line in process.stdout), part


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([TERM] * 4, 75), ([INT], 130), ([TERM, INT, TERM], 75), ([TERM, INT, INT, TERM], 75)],
    ids=lambda value: str(value) if isinstance(value, int) else "+".join(signal.Signals(one).name for one in value),
)
def test_signals_during_training_end_it_after_a_step_with_one_code(recipe, tmp_path, numbers, code):
    words = train_words(recipe, tmp_path / "run", "steps=100000", "checkpoint.every=3")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    wait_for_line(process, "step 4/")
    send(process, numbers)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in said
    assert "Exception" not in said


def test_signals_while_the_command_is_imported_end_it_at_once():
    words = [sys.executable, "-X", "importtime", "-m", "geonorm", "placements"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    # Torch is imported after signals are seen to, and takes seconds.
    wait_for_line(process, "torch")
    send(process, [TERM] * 4)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "Traceback" not in said


@pytest.mark.slow
def test_signals_during_a_comparison_end_its_trials_and_it(tmp_path):
    data = tiny_corpus(tmp_path / "corpus").path
    words = ["--preset", "tiny", "--data", str(data), "--out", str(tmp_path / "run"), "--jobs", "2"]
    words = [*COMMAND, "compare", "steps=1000000", "data.seq_len=16", *words]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    wait_for(lambda: len(trial_processes(tmp_path)) == 2 or process.poll() is not None)
    send(process, [TERM] * 4)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "goes on from it" in said
    assert "Traceback" not in said
    wait_for(lambda: not trial_processes(tmp_path))


def test_handlers_are_as_they_were_afterwards(capsys):
    before = [signal.getsignal(number) for number in (TERM, INT, signal.SIGHUP)]
    assert main(["placements"]) == 0
    assert [signal.getsignal(number) for number in (TERM, INT, signal.SIGHUP)] == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
def test_a_terminal_that_is_closed_ends_nothing():
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.code == 0
