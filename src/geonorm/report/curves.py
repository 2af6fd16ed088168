"""Arrays for the figures: one curve a summary row, averaged over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geonorm.report.series import Metrics, Series

MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """A line with the span of its seeds.

    Attributes:
        x: ``(n,)`` training steps, or layers counted from 1.
        y: ``(n,)`` mean over seeds.
        low: ``(n,)`` least of the seeds.
        high: ``(n,)`` greatest of the seeds.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def top_of_pack(values: Sequence[float]) -> float:
    """The greatest of ``values`` that is not far above the rest: one collapsed row must not set an axis.

    Far is more than four times as far above the least as the median is.
    """
    ranked = sorted(values)
    limit = ranked[0] + max(4 * (ranked[len(ranked) // 2] - ranked[0]), 1e-4)
    return max(value for value in ranked if value <= limit)


def loss_curve(series: Series, kind: str, window: int = 1) -> Curve | None:
    """Loss against step over the steps that every seed logged.

    Args:
        series: the row and its metrics.
        kind: ``"train"`` or ``"eval"``.
        window: rows in the centred running mean that each seed is smoothed with; 1 leaves it as it is.

    Returns:
        the curve, or None where no seed logged a finite loss.
    """
    name = "loss" if kind == "train" else "val_loss"
    seeds = []
    for metrics in series.metrics:
        points = {row["step"]: row[name] for row in getattr(metrics, kind) if row.get(name) is not None}
        if points:
            seeds.append(points)
    if not seeds:
        return None
    steps = sorted(set.intersection(*(set(points) for points in seeds)))
    if not steps:
        return None
    values = np.array([[points[step] for step in steps] for points in seeds], dtype=float)
    values = np.stack([running_mean(row, window) for row in values])
    # A line a few hundred units wide cannot show more points, and every point costs bytes of the page.
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).round().astype(int))
    values = values[:, kept]
    return Curve(np.array(steps)[kept], values.mean(0), values.min(0), values.max(0))


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean of the same length; at the ends the window shrinks evenly on both sides."""
    count, half = len(values), window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(count)
    reach = np.minimum(half, np.minimum(index, count - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def smoothing_window(all_series: list[Series]) -> int:
    """Rows to smooth the training loss over: about a twentieth of the longest log, and odd."""
    longest = max((len(metrics.train) for series in all_series for metrics in series.metrics), default=0)
    return 2 * (longest // 40) + 1


def depth_curve(series: Series, field: str, *, at_end: bool) -> tuple[Curve, int] | None:
    """A quantity by layer, from the first or the last measurement.

    Args:
        series: the row and its metrics.
        field: ``"grad_norm"``, ``"attention"`` or ``"mlp"``; angles are turned from radians to degrees.
        at_end: take the last measurement of each seed, else the first.

    Returns:
        the curve over layers 1 to L and the step of the measurement, or None where nothing was measured.
    """
    found = []
    for metrics in series.metrics:
        measured = ((row["step"], row if field == "grad_norm" else row.get("angle") or {}) for row in metrics.layers)
        logged = [(step, np.array(of[field], dtype=float)) for step, of in measured if of.get(field)]
        found += logged[-1:] if at_end else logged[:1]
    # No number, such as an overflow, is null in the file and NaN here.
    values = [one for _, one in found if len(one) == len(found[0][1])]
    if not values:
        return None
    stack = np.stack(values) if field == "grad_norm" else np.degrees(np.stack(values))
    layers = np.arange(1, stack.shape[1] + 1)
    return Curve(layers, stack.mean(0), stack.min(0), stack.max(0)), found[0][0]
