"""Metrics: rows as JSON lines, readable while the run goes on, trackers, and plain lines for people."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geonorm.storage import finite
from geonorm.training.throughput import Throughput
from geonorm.training.trackers import Tracker, numbers


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


class Reporter:
    """Takes rows from the loop; lives on rank 0.

    Attributes:
        metrics: the file that gets every row.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        trackers: list[Tracker],
        throughput: Throughput,
        steps: int,
        tokens_per_step: int,
        say: Callable[[str], None],
    ) -> None:
        self.metrics, self.trackers, self.throughput = metrics, trackers, throughput
        self.steps, self.tokens_per_step, self.say = steps, tokens_per_step, say

    def emit(self, row: dict[str, Any]) -> None:
        """Take a row."""
        if row["kind"] == "train":
            row = {**row, **self.throughput.since(row["step"], row["seconds"], self.tokens_per_step)}
        self.metrics.write(row)
        for tracker in self.trackers:
            tracker.log(row["step"], numbers(row))
        line = _LINES.get(row["kind"])
        if line is not None:
            self.say(f"step {row['step']}/{self.steps}  {line(row)}")

    def close(self) -> None:
        """Close the file and the trackers."""
        self.metrics.close()
        for tracker in self.trackers:
            tracker.close()


def _train(row: dict[str, Any]) -> str:
    used = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
    memory = f"  {row['peak_memory_bytes'] / 1e9:.2f} GB" if row["peak_memory_bytes"] else ""
    return (
        f"loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_second']:,.0f} tokens/s{used}{memory}"
    )


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "train": _train,
    "eval": lambda row: f"validation loss {row['val_loss']:.4f}  {row['val_bits_per_byte']:.4f} bits/byte",
    "skipped": lambda row: f"skipped: loss {row['loss']}, gradient norm {row['grad_norm']}",
    "unlabelled": lambda row: "no token has a label: not trained on",
    "spike": lambda row: f"loss spike: {row['loss']:.4f}",
    "sample": lambda row: " | ".join(f"{text['prompt']!r} -> {text['text']!r}" for text in row["texts"]),
}
