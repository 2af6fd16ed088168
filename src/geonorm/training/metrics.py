"""Metrics as JSON lines: one row an event, readable while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from geonorm.storage import finite


class MetricsFile:
    """Appends rows to ``path``; others can read a row once :meth:`write` returns. NaN and infinity become null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Write one row."""
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
