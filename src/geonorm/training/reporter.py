"""What a run says: rows of metrics, trackers, and plain lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geonorm.training.metrics import MetricsFile
from geonorm.training.throughput import Throughput
from geonorm.training.trackers import Tracker, numbers


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
