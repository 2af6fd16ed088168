"""How far long work is: a bar with the time left on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Progress through one stage after the other; a context manager.

    On a terminal the bar is gone when the work ends. Elsewhere a stage that takes less than ten seconds says nothing,
    and a longer one a line every ten seconds.
    """

    def __init__(self, console: Console) -> None:
        """Show progress on a console of rich."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", visible=False)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line that stays: no markup in it, and no line break that a copy would keep."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: float | None = None, unit: str = "", done: float = 0) -> None:
        """Begin a stage.

        Args:
            what: what is done, such as ``"inspecting"``.
            total: how much there is; None where nobody knows, and then no time left is shown.
            unit: of ``total``, such as ``"windows"``.
            done: how much of it was done before, as by a run that goes on.
        """
        self._what, self._total, self._unit, self._done = what, total, unit, done
        self._said = time.monotonic()
        self._bar.reset(self._task, total=total, completed=int(done), description=self._line(""), visible=True)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Say that so much more of the stage is done; ``note`` stands behind it, such as a loss."""
        self._done += amount
        line = self._line(note)
        self._bar.update(self._task, completed=self._done, description=line)
        if self._bar.disable and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self.say(line)

    def _line(self, note: str) -> str:
        of = "" if self._total is None else f" of {self._total:,.0f}"
        count = f": {self._done:,.0f}{of} {self._unit}" if self._unit else ""
        return f"{self._what}{count}{f', {note}' if note else ''}"
