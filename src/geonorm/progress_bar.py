"""How far long work is: a bar with the time left on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 10.0
# Pieces of work may take seconds each, and several are needed to tell how fast it goes.
_SECONDS_OF_SPEED = 300.0


class ProgressBar:
    """Progress through one stage after the other; a context manager.

    On a terminal the bar is gone when the work ends. Elsewhere a stage that takes less than ten seconds says nothing,
    and a longer one a line every ten seconds.
    """

    def __init__(self, console: Console | None = None, say: Callable[[str], None] | None = None) -> None:
        """Show progress on a console of rich; without one, pass the plain lines to ``say``."""
        self.console, self._pass_on = console, say
        self.what = ""
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            # Narrow, so that the time left has room beside a line of words.
            columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn()
            self._bar = Progress(*columns, console=console, transient=True, speed_estimate_period=_SECONDS_OF_SPEED)
            self._task = self._bar.add_task("", visible=False)

    def __enter__(self) -> Any:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line that stays: no markup in it, and no line break that a copy would keep."""
        if self.console is not None:
            self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        elif self._pass_on is not None:
            self._pass_on(line)

    def begin(self, what: str, total: float | None = None, unit: str = "", done: float = 0) -> None:
        """Begin a stage.

        Args:
            what: what is done, such as ``"inspecting"``.
            total: how much there is; None where nobody knows, and then no time left is shown.
            unit: of ``total``, such as ``"windows"``.
            done: how much of it was done before, as by a run that goes on.
        """
        self.what, self._total, self._unit, self._done = what, total, unit, done
        self._began = self._said = time.monotonic()
        if self._bar is not None:
            line = line_of(what, done, total, unit)
            self._bar.reset(self._task, total=total, completed=int(done), description=line, visible=True)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Say that so much more of the stage is done; ``note`` stands behind it, such as a loss."""
        self.show(self._done + amount, self._total, note)

    def show(self, done: float, total: float | None, note: str = "", counts: Mapping[str, int] | None = None) -> None:
        """Say how much of the stage is done.

        Args:
            done: so much.
            total: as in `begin`; it may change.
            note: stands behind it.
            counts: further numbers by their unit, for which only a plain line has room, and after its first second
                how many of the last of them there were in a second.
        """
        self._done, self._total, now = done, total, time.monotonic()
        notes = [note] * bool(note)
        # A stage may begin with work that was done before, so its first moment tells no rate.
        if counts and now - self._began >= 1:
            unit, count = list(counts.items())[-1]
            notes.append(f"{count / (now - self._began):,.0f} {unit}/s")
        if self._bar is not None:
            line = line_of(self.what, done, total, self._unit, *notes)
            self._bar.update(self._task, completed=done, total=total, description=line)
        elif now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            more = (f"{count:,} {unit}" for unit, count in (counts or {}).items())
            self.say(line_of(self.what, done, total, self._unit, *more, *notes))


def line_of(what: str, done: float, total: float | None, unit: str, *notes: str) -> str:
    """One line for people, such as ``"training: 3 of 5 steps, loss 2.1"``."""
    of = "" if total is None else f" of {total:,.0f}"
    return ", ".join([f"{what}: {done:,.0f}{of} {unit}" if unit else what, *notes])
