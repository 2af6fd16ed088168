"""Learning rates: which one a placement's trials choose, and which to try next.

One loss curve over rates differs from placement to placement, and steps of two on a grid can miss a best by as much as
placements differ. A choice counts as tuned once both neighbours a factor of sqrt(2) away have been tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from geonorm.report.results import Trial

FACTOR = math.sqrt(2)
MORE_ROUNDS = 6
# Rates are rounded by less than the first, so a ratio moves by less than the second.
_ROUNDING, _TOLERANCE = 0.005, 0.02


def best_lr(trials: Iterable[Trial], seed: int) -> float | None:
    """The rate with the lowest validation loss among one placement's trials of a seed; None if none finished."""
    losses = {t.lr: t.val_loss for t in trials if t.seed == seed and t.status == "ok" and t.val_loss is not None}
    return min(losses, key=lambda lr: losses[lr]) if losses else None


def untried_neighbours(best: float, tried: Iterable[float]) -> list[float]:
    """Rates to try so that, for a factor of sqrt(2) to either side of the best, no step between two is above sqrt(2).

    At most two, rounded. Rates close to the best alone would say nothing of a better one farther off.
    """
    tried = list(tried)
    below, above = ([lr / best for lr in tried if lr < best], [lr / best for lr in tried if lr > best])
    missing = [] if _reaches([1 / ratio for ratio in below]) else [_rounded(best / FACTOR)]
    return missing if _reaches(above) else [*missing, _rounded(best * FACTOR)]


def _reaches(ratios: list[float]) -> bool:
    """Whether ratios above 1 lead from 1 to sqrt(2) without a step above sqrt(2)."""
    reached = 1.0
    for ratio in sorted(ratios):
        if ratio > reached * FACTOR * (1 + _TOLERANCE):
            break
        reached = ratio
    return reached >= FACTOR / (1 + _TOLERANCE)


def is_tuned(trials: Iterable[Trial], seed: int) -> bool:
    """True if one placement's trials of a seed surround the best as :func:`untried_neighbours` asks.

    A neighbour at which the trial diverged counts; one at which it failed, for a reason outside the training, does not.
    """
    trials = list(trials)
    best = best_lr(trials, seed)
    tried = {trial.lr for trial in trials if trial.seed == seed and trial.status != "failed"}
    return best is not None and not untried_neighbours(best, tried)


def _rounded(lr: float) -> float:
    """The rate in as few digits as do: 0.00566, 0.0113, and 0.02 where the last step was to 0.0141."""
    candidates = (float(f"{lr:.{digits}g}") for digits in (1, 2, 3))
    return next(one for one in candidates if abs(one / lr - 1) < _ROUNDING)
