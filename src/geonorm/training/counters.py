"""How far a run has come: the counters that a checkpoint carries besides tensors."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

import numpy as np

# The rule of arXiv 2501.00656 (OLMo 2): seven deviations from a rolling mean of 1,000 losses.
SPIKE_WINDOW = 1000
# A deviation of a handful of losses, in the steep first steps, says nothing.
SPIKE_MINIMUM = 100


@dataclasses.dataclass
class Counters:
    """Counters of a run; plain data, so that they are saved as JSON, exactly.

    Attributes:
        step: optimiser steps done, those skipped included.
        labelled_tokens: target tokens of those steps that had a label.
        seconds: wall time of training steps alone.
        unlabelled: steps in which no token had a label.
        skipped: steps whose loss or gradient was not finite; in_a_row: of them, those up to now without a good one.
        spikes: losses far above those before them, see :meth:`add_loss`.
        tail: latest losses, those skipped left out; at most as many as the mean at the end is taken over.
        recent: latest losses that spikes are told by.
    """

    step: int = 0
    labelled_tokens: int = 0
    seconds: float = 0.0
    unlabelled: int = 0
    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    tail: deque[float] = dataclasses.field(default_factory=deque)
    recent: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=SPIKE_WINDOW))

    @classmethod
    def start(cls, steps: int) -> Counters:
        """Return the progress of a run of ``steps`` steps before its first."""
        return cls(tail=deque(maxlen=max(1, steps // 10)))

    def add_loss(self, loss: float, deviations: float) -> bool:
        """Count the loss of a step that was taken.

        Returns:
            Whether it is a spike: more than ``deviations`` standard deviations above the mean of the up to 1,000 losses
            before it, of which there must be 100.
        """
        spike = False
        if len(self.recent) >= SPIKE_MINIMUM:
            before = np.array(self.recent)
            spike = bool(loss > before.mean() + deviations * before.std())
        self.spikes += spike
        self.in_a_row = 0
        self.tail.append(loss)
        self.recent.append(loss)
        return spike

    def add_skipped(self) -> None:
        """Count a step that was not taken."""
        self.skipped += 1
        self.in_a_row += 1

    def train_loss(self) -> float:
        """Mean of the latest losses; NaN if there are none."""
        return float(np.mean(list(self.tail))) if self.tail else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` gives the progress back."""
        return {**vars(self), "tail": list(self.tail), "recent": list(self.recent)}

    @classmethod
    def from_json(cls, data: dict[str, Any], steps: int) -> Counters:
        """Rebuild the progress of a run of ``steps`` steps."""
        progress = cls.start(steps)
        for name in ("step", "labelled_tokens", "unlabelled", "skipped", "in_a_row", "spikes"):
            # Checkpoints that do not count steps without labels are older than the count.
            setattr(progress, name, int(data.get(name, 0) if name == "unlabelled" else data[name]))
        progress.seconds = float(data["seconds"])
        progress.tail.extend(map(float, data["tail"]))
        progress.recent.extend(map(float, data["recent"]))
        return progress
