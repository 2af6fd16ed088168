"""The console as a place that may be gone: what is said there never ends, changes or delays a run."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

# What nobody has read yet, in bytes; more than that is not kept.
_MOST_PENDING = 1 << 23
_CHUNK = 1 << 12
# A console that takes nothing for so long, when all is done, is not waited for.
_PATIENCE = 2.0


class Steady(io.TextIOBase):
    """A text stream that passes on what it can and neither fails nor waits.

    A thread writes, so that a full pipe or a stopped terminal holds up nobody. Characters that the stream cannot encode
    are written as escapes, as Python does on standard error.
    """

    def __init__(self, stream: Any) -> None:
        """Wrap a stream; None for one that was closed before the process began."""
        self.stream = stream
        self.is_result = False
        self._lock = threading.Lock()
        self._fork()
        try:
            self._descriptor = None if stream is None else stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._descriptor = None

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Encoding of the stream."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    @property
    def buffer(self) -> Any:
        """The stream's own buffer."""
        return self.stream.buffer

    def fileno(self) -> int:
        """The stream's own."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return self.stream.isatty()
        return False

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write, without waiting.

        Raises:
            OSError: :func:`results_are_printed` was called, and the text could not be written for another reason than
                that nobody reads it.
        """
        if self._descriptor is None:
            self._write_to_stream(text)
        elif text:
            data = text.replace("\n", os.linesep).encode(self.encoding, "backslashreplace")
            self._send(data) if self.is_result else self._enqueue(data)
        return len(text)

    def drain(self) -> None:
        """Wait until everything is written, but no longer than the console takes something."""
        since, done = time.monotonic(), self._done
        while self._done < self._put and time.monotonic() - since < _PATIENCE:
            if self._done != done:
                since, done = time.monotonic(), self._done
            time.sleep(0.002)

    def _write_to_stream(self, text: str) -> None:
        if self.stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self.stream.write(text)
                self.stream.flush()

    def _enqueue(self, data: bytes) -> None:
        if os.getpid() != self._process:
            self._fork()
        with self._lock:
            if self._put - self._done > _MOST_PENDING:
                return
            self._put += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._pump, args=(self._queue,), name="console", daemon=True)
                self._thread.start()
        self._queue.put(data)

    def _fork(self) -> None:
        # Threads do not come along into a process that is forked.
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._put = self._done = 0
        self._lock = threading.Lock()

    def _pump(self, pending: queue.SimpleQueue[bytes]) -> None:
        while True:
            data = pending.get()
            for start in range(0, len(data), _CHUNK):
                chunk = data[start : start + _CHUNK]
                # Whoever went away may come back, as a disk that was full does.
                with contextlib.suppress(OSError):
                    self._send(chunk)
                self._done += len(chunk)

    def _send(self, data: bytes) -> None:
        # The descriptor, because what Python's own stream could not write it tries again at exit, and fails then.
        assert self._descriptor is not None
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except BrokenPipeError:
                return


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Make standard output and standard error :class:`Steady` while open."""
    _open_missing()
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.StringIO() if sys.stdin is None else sys.stdin
    sys.stdout, sys.stderr = Steady(sys.stdout), Steady(sys.stderr)
    try:
        yield
    finally:
        drain()
        sys.stdin, sys.stdout, sys.stderr = before


def drain() -> None:
    """Wait for what was said, see :meth:`Steady.drain`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Steady):
            stream.drain()


def results_are_printed() -> None:
    """Say that standard output is what the command is for: what cannot be written there is an error then."""
    if isinstance(sys.stdout, Steady):
        sys.stdout.is_result = True


def _open_missing() -> None:
    """Open what was closed before the process began: else the next file to be opened would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
