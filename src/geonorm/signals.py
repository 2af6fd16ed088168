"""Ending well when a scheduler or a person asks for it, and not because a terminal was closed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# BSD's EX_TEMPFAIL: nothing is wrong, try again. Schedulers can requeue by it.
TRY_AGAIN = 75
INTERRUPTED = 130
_ASKING = ("SIGTERM", "SIGINT", "SIGUSR1")
# Sent when a terminal is closed, or written to from the background. Processes that are started inherit this.
_OF_A_TERMINAL = ("SIGHUP", "SIGTTOU")
# Signals that follow each other faster are one request.
_TOGETHER_SECONDS = 1.0
_active: StopRequest | None = None


class StopRequest:
    """Notes SIGTERM, SIGUSR1 and SIGINT.

    While :attr:`waiting_for_step` they only set :attr:`code`, and a step ends first; otherwise they interrupt at once,
    as does a second SIGINT. Schedulers send SIGTERM more than once, so what follows within a second changes nothing but
    the code: who was asked by SIGTERM answers 75, whatever else was sent.

    Attributes:
        code: exit code that was asked for, or 0.
        waiting_for_step: see above.
        leaves_at_once: a signal ends the process on the spot, because nothing was begun that could be left half done.
        raised: whether a signal has interrupted what was going on.
    """

    def __init__(self, leaves_at_once: bool = False) -> None:
        self.code = 0
        self.waiting_for_step = False
        self.leaves_at_once = leaves_at_once
        self.raised = False
        self.restored = True
        self._interrupts = 0
        self._raised_at = -_TOGETHER_SECONDS
        self._before: dict[int, Any] = {}

    def take(self) -> None:
        """Take signals from now on, where this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in _numbers(_ASKING):
                self._before[number] = signal.signal(number, self.handle)
            for number in _numbers(_OF_A_TERMINAL):
                self._before[number] = signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        """Let signals do again what they did before, unless they are to be ignored for good."""
        if self.restored:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def ignore_further(self) -> None:
        """Take no more notice of signals, for as long as this process lives."""
        self.restored = False
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, frame: Any) -> None:
        """Take a signal."""
        self._interrupts += number == signal.SIGINT
        if self.code != TRY_AGAIN:
            self.code = INTERRUPTED if number == signal.SIGINT else TRY_AGAIN
        if self.leaves_at_once:
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted\n")
            os._exit(self.code)
        insists = number == signal.SIGINT and self._interrupts > 1
        together = time.monotonic() - self._raised_at < _TOGETHER_SECONDS
        if (insists or not self.waiting_for_step) and not together:
            self.raised, self._raised_at = True, time.monotonic()
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_requests(*, leaves_at_once: bool = False) -> Iterator[StopRequest]:
    """Take signals while open; afterwards they do what they did before. Inside another one, that one goes on."""
    global _active
    if _active is not None:
        yield _active
        return
    request = _active = StopRequest(leaves_at_once)
    request.take()
    try:
        yield request
    finally:
        _active = None
        request.give_back()


def begin() -> None:
    """Say that everything is imported and work begins, which a signal interrupts so that it can be cleared up."""
    if _active is not None:
        _active.leaves_at_once = False


def leave_while_importing() -> None:
    """Have signals end the process on the spot, for as long as the ``geonorm`` command is only being imported."""
    StopRequest(leaves_at_once=True).take()


@functools.cache
def is_command() -> bool:
    """Whether this process is the ``geonorm`` command, and no program that imports geonorm.

    Decided once, while geonorm is imported: later ``-m`` no longer stands in the arguments.
    """
    return Path(sys.argv[0]).stem == "geonorm" or (sys.argv[0] == "-m" and "geonorm" in sys.orig_argv)


def _numbers(names: tuple[str, ...]) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]
