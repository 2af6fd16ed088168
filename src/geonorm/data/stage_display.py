"""How far a preparation is: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_OF_SPEED = 300.0


@dataclasses.dataclass(frozen=True)
class StageCounts:
    """How far one stage is.

    Attributes:
        stage: ``"reading"`` or ``"encoding"``.
        num_documents: so far.
        num_bytes: of text, so far.
        num_tokens: so far; 0 while reading.
        total_bytes: of text in this stage, estimated from the sizes of files where it is not known; None where that
            cannot be.
    """

    stage: str
    num_documents: int
    num_bytes: int
    num_tokens: int
    total_bytes: int | None

    def line(self, seconds: float, short: bool = False) -> str:
        """One line for people, ``seconds`` after the stage began; a short one leaves room for a bar beside it."""
        of = "" if self.total_bytes is None else f" of {self.total_bytes / 1e6:,.0f}"
        words = [f"{self.stage}: {self.num_bytes / 1e6:,.0f}{of} MB"]
        if not short:
            words.append(f"{self.num_documents:,} documents")
        if self.num_tokens and not short:
            words.append(f"{self.num_tokens:,} tokens")
        # A stage may begin with shards behind it, so its first moment tells no rate.
        if self.num_tokens and seconds >= 1:
            words.append(f"{self.num_tokens / seconds:,.0f} tokens/s")
        return ", ".join(words)


class PlainLines:
    """Passes a line on every ten seconds and none for what takes less."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self._stage = ""

    def __call__(self, counts: StageCounts) -> None:
        """Take note of how far it is."""
        now = time.monotonic()
        if counts.stage != self._stage:
            self._stage, self._began, self._reported = counts.stage, now, now
        elif now - self._reported >= _SECONDS_BETWEEN_LINES:
            self._reported = now
            self.report(counts.line(now - self._began))


class StageDisplay:
    """Shows how far it is on a console: a bar on a terminal, `PlainLines` elsewhere. A context manager."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console
        self._plain = PlainLines(self.report)
        columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn()
        # A shard takes seconds, and several are needed to tell how fast it goes.
        bar = Progress(*columns, console=console, transient=True, speed_estimate_period=_SECONDS_OF_SPEED)
        self._bar = bar if console.is_terminal else None
        self._stage = ""

    def __enter__(self) -> StageDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def report(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __call__(self, counts: StageCounts) -> None:
        """Show how far it is."""
        if self._bar is None:
            self._plain(counts)
            return
        if counts.stage != self._stage:
            self._stage, self._began = counts.stage, time.monotonic()
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(counts.stage)
        (task,) = self._bar.task_ids
        line = counts.line(time.monotonic() - self._began, short=True)
        self._bar.update(task, description=line, completed=counts.num_bytes, total=counts.total_bytes)
