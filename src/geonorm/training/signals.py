"""Ending well when a scheduler or a person asks for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

# BSD's EX_TEMPFAIL: nothing is wrong, try again. Schedulers can requeue by it.
TRY_AGAIN = 75
INTERRUPTED = 130


class StopRequest:
    """Notes SIGTERM, SIGUSR1 and SIGINT.

    While :attr:`waiting_for_step` they only set :attr:`code`, and a step ends first; otherwise they interrupt at once,
    as does a second SIGINT. Schedulers send SIGTERM more than once, so a second one changes nothing.

    Attributes:
        code: exit code that was asked for, or 0.
    """

    def __init__(self) -> None:
        self.code = 0
        self.waiting_for_step = False
        self.numbers: list[int] = []
        self.restored = True

    def ignore_further(self) -> None:
        """Take no more notice of signals, for as long as this process lives."""
        self.restored = False
        for number in self.numbers:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, frame: Any) -> None:
        """Take a signal."""
        again = self.code == INTERRUPTED and number == signal.SIGINT
        self.code = INTERRUPTED if number == signal.SIGINT else TRY_AGAIN
        if again or not self.waiting_for_step:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take signals while open, where this is the main thread; afterwards they do what they did before."""
    request = StopRequest()
    before = {}
    if threading.current_thread() is threading.main_thread():
        names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
        request.numbers = [getattr(signal, name) for name in names]
        for number in request.numbers:
            before[number] = signal.signal(number, request.handle)
    try:
        yield request
    finally:
        if request.restored:
            for number, handler in before.items():
                signal.signal(number, handler)
