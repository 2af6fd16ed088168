"""Metrics as JSON lines: one row an event, readable while the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends rows to ``path``; each row is on disk when :meth:`write` returns. Non-finite numbers become null."""

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


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, at any depth, because JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
