"""What long work says while it runs: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import io
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
