"""How far a preparation is: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far one stage is.

    Attributes:
        stage: ``"reading"`` or ``"encoding"``.
        num_documents: so far.
        num_bytes: of text, so far.
        num_tokens: so far; 0 while reading.
        total_bytes: of text in this stage, None where nobody knows yet.
    """

    stage: str
    num_documents: int
    num_bytes: int
    num_tokens: int
    total_bytes: int | None

    def line(self, seconds: float) -> str:
        """One line for people, ``seconds`` after the stage began."""
        of = "" if self.total_bytes is None else f" of {self.total_bytes / 1e6:,.0f}"
        words = [f"{self.stage}: {self.num_bytes / 1e6:,.0f}{of} MB", f"{self.num_documents:,} documents"]
        if self.num_tokens:
            words.append(f"{self.num_tokens:,} tokens")
        # A stage may begin with shards behind it, so its first moment tells no rate.
        if self.num_tokens and seconds >= 1:
            words.append(f"{self.num_tokens / seconds:,.0f} tokens/s")
        return ", ".join(words)


class PlainProgress:
    """Passes a line on every ten seconds and none for what takes less."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._stage = ""

    def __call__(self, progress: Progress) -> None:
        """Take note of a progress."""
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._began, self._said = progress.stage, now, now
        elif now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self.say(progress.line(now - self._began))


class LiveProgress:
    """Shows progress on a console: one live line on a terminal, `PlainProgress` elsewhere. A context manager."""

    def __init__(self, console: Console) -> None:
        from rich.status import Status

        self.console = console
        self._plain = PlainProgress(self.say)
        self._live = Status("reading", console=console) if console.is_terminal else None
        self._stage = ""

    def __enter__(self) -> LiveProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __call__(self, progress: Progress) -> None:
        """Show how far it is."""
        if self._live is None:
            self._plain(progress)
            return
        if progress.stage != self._stage:
            self._stage, self._began = progress.stage, time.monotonic()
        self._live.update(progress.line(time.monotonic() - self._began))
