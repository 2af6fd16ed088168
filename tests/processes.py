"""Processes of trials, found by their command lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WORKER = b"geonorm.sweep.trial"


def trial_processes(mark: Path) -> list[int]:
    """Ids of the trial processes that name ``mark``, such as the folder of their corpus, on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if WORKER in words and any(str(mark).encode() in word for word in words):
            found.append(int(path.parent.name))
    return found


def parent(process: int) -> int:
    """Id of the process that started another."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Wait until ``condition`` holds.

    Raises:
        TimeoutError: it does not within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"still not so after {seconds} s")
        time.sleep(0.1)
