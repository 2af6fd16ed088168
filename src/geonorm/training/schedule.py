"""The learning rate as a function of the step alone, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from typing import Any, Protocol


class Factor(Protocol):
    """Part of the peak learning rate at optimiser step ``step``, counted from 0."""

    def __call__(self, step: int) -> float:
        """Return the part."""
        ...


def lr_factor(step: int, *, steps: int, warmup: int, min_ratio: float) -> float:
    """Part of the peak learning rate at optimiser step ``step`` (from 0): linear warm-up, then a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def wsd_factor(step: int, *, steps: int, warmup: int, decay: int, min_ratio: float) -> float:
    """Linear warm-up, the peak, then a line to ``min_ratio``, which the last step reaches (arXiv 2404.06395).

    Args:
        step: optimiser step, counted from 0.
        steps: of the whole run; warmup: first ones; decay: last ones. Longer runs share all steps before the decay.
        min_ratio: part of the peak at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = step + 1 - (steps - decay)
    return 1.0 if done <= 0 else 1 - (1 - min_ratio) * min(1.0, done / decay)


class Schedule:
    """Sets the rate of an optimiser's groups before each step; every group follows its own peak."""

    def __init__(self, optimizer: Any, factor: Factor) -> None:
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.peaks: list[float] = [group["lr"] for group in self.groups]
        self.factor = factor

    def apply(self, step: int) -> float:
        """Set the rates for optimiser step ``step``, counted from 0; returns that of the first group."""
        part = self.factor(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * part
        return self.groups[0]["lr"]
