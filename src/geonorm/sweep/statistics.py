"""Intervals that know what varies: the seed of a model, and the documents that it is judged on.

A loss by seed s and document d is read as ``mean + seed_s + document_d + rest_sd``: every seed is judged on the same
documents, so the two are crossed. The variance of the mean over both is taken by the method of moments: what varies
from seed to seed, plus what varies from document to document, less what both contain of the rest. Degrees of freedom
are Satterthwaite's; those of the documents allow for their unequal sizes (Bell and McCaffrey 2002). An interval is
never narrower than Student's over the seeds alone. ``benchmarks/coverage.py`` measures how often it holds the truth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with what is known of its error.

    Attributes:
        mean: the estimate.
        kind: what the error is over: ``"seeds and documents"``, ``"seeds"``, ``"documents"`` or ``""`` for nothing.
        errors: standard error and degrees of freedom, one pair a way to reckon it; the widest interval counts.
        fixed: the 95 % interval of an estimate that has no standard error, as a bootstrap gives it.
    """

    mean: float
    kind: str = ""
    errors: tuple[tuple[float, float], ...] = ()
    fixed: tuple[float, float] | None = None

    def interval(self, level: float = LEVEL) -> tuple[float, float] | None:
        """Interval of the mean at a level; None where nothing is known, or for a bootstrap at another level."""
        if not self.errors:
            return self.fixed if level == LEVEL else None
        half = max(float(stats.t.ppf((1 + level) / 2, freedom)) * error for error, freedom in self.errors)
        return self.mean - half, self.mean + half

    def p_value(self) -> float:
        """Two-sided: one less the highest level at which the interval excludes zero; 1 where nothing is known."""
        if not self.errors or self.mean == 0:
            return 1.0
        return max(
            float(2 * stats.t.sf(abs(self.mean) / error, freedom)) if error else 0.0 for error, freedom in self.errors
        )


def estimate(losses: np.ndarray, documents: np.ndarray | None = None, labels: np.ndarray | None = None) -> Estimate:
    """Mean of losses, or of paired differences of losses, with its error.

    Args:
        losses: ``[num_seeds, num_windows]``; or ``[num_seeds, 1]``, the means alone, where no windows are on record.
        documents: document, or group of documents, of each window, int ``[num_windows]``; None where not on record.
        labels: number of tokens of each window that its loss is the mean of, ``[num_windows]``; None for all alike. The
            mean is over tokens.

    Returns:
        over seeds and documents with two of each; over seeds with two seeds; with one seed over documents, which says
        how exactly that one model was measured and nothing of another seed.
    """
    num_seeds = len(losses)
    by_seed = losses.mean(axis=1) if labels is None else np.average(losses, axis=1, weights=labels)
    mean = float(by_seed.mean())
    means, sizes = _by_document(losses, documents, labels)
    if num_seeds == 1:
        return _one_seed(mean, means[0], sizes)
    seeds = float(by_seed.var(ddof=1)) / num_seeds
    alone = (math.sqrt(seeds), num_seeds - 1.0)
    if len(sizes) < 2:
        return Estimate(mean, "seeds", (alone,))
    weights = sizes / sizes.sum()
    scale, freedom = _document_freedom(weights)
    by_document = means.mean(axis=0)
    rest = means - by_seed[:, None] - by_document + mean
    documents_part = scale * float(np.sum((weights * (by_document - mean)) ** 2))
    rest_part = scale * float(np.sum((weights * rest) ** 2)) / (num_seeds * (num_seeds - 1))
    total = max(seeds + documents_part - rest_part, seeds)
    if total == 0:
        return Estimate(mean, "seeds and documents", (alone,))
    spread = seeds**2 / (num_seeds - 1) + documents_part**2 / freedom + rest_part**2 / (freedom * (num_seeds - 1))
    # With few seeds the subtraction can leave next to no degrees of freedom, and an interval of any length.
    satterthwaite = max(total**2 / spread, 1.0)
    return Estimate(mean, "seeds and documents", ((math.sqrt(total), satterthwaite), alone))


def holm_levels(p_values: Sequence[float], alpha: float = 1 - LEVEL) -> list[float]:
    """Levels of intervals by which, with probability ``1 - alpha``, no difference that is none is called one.

    Holm's step-down rule: an interval at its level excludes zero exactly if Holm's test rejects.

    Args:
        p_values: one a comparison.
    """
    levels = [0.0] * len(p_values)
    divisor, stopped = len(p_values), False
    for index in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        levels[index] = 1 - alpha / divisor
        stopped = stopped or p_values[index] >= alpha / divisor
        # After the first that is not rejected none may be, so the level stays.
        divisor -= not stopped
    return levels


def _by_document(
    losses: np.ndarray, documents: np.ndarray | None, labels: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss ``[num_seeds, num_documents]`` and number of windows, or of labels, ``[num_documents]``."""
    one_for_all = np.zeros(losses.shape[1], dtype=int)
    names, index = np.unique(one_for_all if documents is None else documents, return_inverse=True)
    sizes = np.bincount(index, weights=labels, minlength=len(names)).astype(float)
    sums = losses if labels is None else losses * labels
    means = np.stack([np.bincount(index, weights=row, minlength=len(names)) for row in sums]) / sizes
    return means, sizes


def _document_freedom(weights: np.ndarray) -> tuple[float, float]:
    """What makes the sum of squared weighted deviations unbiased, and its degrees of freedom, for documents alike."""
    centred = np.eye(len(weights)) - weights
    form = (centred * weights[:, None]).T @ (centred * weights[:, None])
    trace = float(np.trace(form))
    return float(np.sum(weights**2)) / trace, trace**2 / float(np.sum(form * form))


def _one_seed(mean: float, means: np.ndarray, sizes: np.ndarray) -> Estimate:
    """A bootstrap over whole documents; repeatable."""
    if len(sizes) < 2 or np.ptp(means) == 0:
        return Estimate(mean)
    result = stats.bootstrap(
        (means * sizes, sizes),
        lambda sums, counts, axis: sums.sum(axis=axis) / counts.sum(axis=axis),
        paired=True,
        confidence_level=LEVEL,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    interval = (float(result.confidence_interval.low), float(result.confidence_interval.high))
    return Estimate(mean, "documents", fixed=interval)
