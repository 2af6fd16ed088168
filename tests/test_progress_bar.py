"""What long work says while it runs: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from geonorm import progress_bar
from geonorm.progress_bar import ProgressBar


def work(console: Console) -> str:
    with ProgressBar(console) as bar:
        bar.begin("scoring", 4, "windows")
        for number in range(1, 5):
            bar.advance(note=f"loss {number}")
        bar.begin("calibrating")
        bar.advance()
        bar.say("kept [bold]as it is[/bold]")
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_short_work_says_nothing_where_nobody_looks():
    assert work(Console(file=io.StringIO())) == "kept [bold]as it is[/bold]\n"


def test_long_work_says_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress_bar, "SECONDS_BETWEEN_LINES", 0.0)
    lines = work(Console(file=io.StringIO())).splitlines()
    assert lines[0] == "scoring: 1 of 4 windows, loss 1"
    assert lines[3:] == ["scoring: 4 of 4 windows, loss 4", "calibrating", "kept [bold]as it is[/bold]"]


@pytest.mark.parametrize("done", [0, 2])
def test_a_terminal_shows_a_bar_with_the_time_left(done):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with ProgressBar(console) as bar:
        bar.begin("scoring", 4, "windows", done=done)
        bar.advance()
        time.sleep(0.3)  # redrawn ten times a second
        shown = console.file.getvalue()
    assert f"scoring: {done + 1} of 4 windows" in shown
    assert ":" in shown.rsplit("windows", 1)[1]


@pytest.mark.parametrize("where", ["terminal", "file", "lines"])
def test_live_on_a_terminal_and_every_ten_seconds_elsewhere(monkeypatch, where):
    now, lines, output = 0.0, [], io.StringIO()
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    console = None if where == "lines" else Console(file=output, width=100, force_terminal=where == "terminal")
    with ProgressBar(console, lambda line: lines.append(f"{line}\n")) as bar:
        bar.begin("encoding", unit="MB")
        for second in range(25):
            now = float(second)
            bar.show(second, 50, counts={"documents": second, "tokens": second * 250_000})
        bar.say("the end [1/2]")
    shown = output.getvalue() + "".join(lines)
    if where != "terminal":
        assert shown == (
            "encoding: 10 of 50 MB, 10 documents, 2,500,000 tokens, 250,000 tokens/s\n"
            "encoding: 20 of 50 MB, 20 documents, 5,000,000 tokens, 250,000 tokens/s\n"
            "the end [1/2]\n"
        )
    else:
        assert "\x1b" in shown
        # The bar has a clock of its own, so that the time left is not told beforehand.
        assert re.search(r"encoding: 24 of 50 MB, 250,000 tokens/s .*\d:\d\d:\d\d", shown)
        assert "the end [1/2]" in shown


def test_no_rate_is_told_when_a_stage_has_just_begun(monkeypatch):
    monkeypatch.setattr(progress_bar, "SECONDS_BETWEEN_LINES", 0.0)
    lines, clock = [], iter((0.0, 4e-6, 2.0))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
    bar = ProgressBar(say=lines.append)
    bar.begin("encoding", unit="MB")
    for _ in range(2):
        bar.show(0.2, None, counts={"documents": 8, "tokens": 117_681})
    assert lines == [
        "encoding: 0 MB, 8 documents, 117,681 tokens",
        "encoding: 0 MB, 8 documents, 117,681 tokens, 58,840 tokens/s",
    ]
