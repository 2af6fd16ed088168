"""Metrics as JSON lines: one row an event, readable while the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from geonorm.storage import finite


class MetricsFile:
    """Appends rows to ``path``; others can read a row once :meth:`write` returns. NaN and infinity become null."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Open the file.

        Args:
            path: the file.
            keep: bytes of an existing file to keep; the rest is what a run wrote that is now taken up from before it.
        """
        self.path = path
        self._file = path.open("ab")
        # Never longer than it is: what is missing would become zeros.
        self._file.truncate(min(keep, self._file.tell()))

    def write(self, row: dict[str, Any]) -> None:
        """Write one row."""
        self._file.write(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Bring all rows to the disk; returns the size of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
