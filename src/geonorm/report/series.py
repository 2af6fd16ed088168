"""The rows of a comparison with what their trials logged, averaged over seeds: what the figures draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.errors import UserError
from geonorm.report.format import counted, short_labels
from geonorm.report.results import Results, Row, Trial
from geonorm.report.style import Look, looks

MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """A line with the span of its seeds, or of its quartiles.

    Attributes:
        x: ``(n,)`` training steps, or layers counted from 1.
        y: ``(n,)`` mean over seeds.
        low, high: ``(n,)`` least and greatest of the seeds.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Metrics:
    """What one trial logged, by step: training losses, validation losses, quantities by layer (angles in radians)."""

    train: dict[int, float] = field(default_factory=dict)
    eval: dict[int, float] = field(default_factory=dict)
    layers: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    skipped: int = 0
    found: bool = True


@dataclass(frozen=True)
class Series:
    """One row of the summary with the trials that it shows.

    Attributes:
        row: the summary row.
        short: its placement with only those options that tell it from other rows of the same placement.
        every: all trials of this row, at every learning rate and with every status.
        trials: those that the row shows the mean of, one a seed.
        metrics: what each of ``trials`` logged, in the same order.
        look: how it is drawn.
    """

    row: Row
    short: str
    every: list[Trial]
    trials: list[Trial]
    metrics: list[Metrics]
    look: Look

    def loss_curve(self, kind: str, window: int = 1) -> Curve | None:
        """Loss against step over the steps that every seed logged; None where no seed logged a finite loss.

        Args:
            kind: ``"train"`` or ``"eval"``.
            window: rows in the centred running mean that each seed is smoothed with; 1 leaves it as it is.
        """
        seeds = [points for metrics in self.metrics if (points := getattr(metrics, kind))]
        steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if not steps:
            return None
        values = np.stack([running_mean(np.array([points[step] for step in steps]), window) for points in seeds])
        # A line a few hundred units wide cannot show more points, and every point costs bytes of the page.
        kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).round().astype(int))
        return _over_seeds(np.array(steps)[kept], values[:, kept])

    def depth_curve(self, quantity: str, *, at_end: bool) -> tuple[Curve, int] | None:
        """A quantity over layers 1 to L and the step of its first or last measurement; None where there is none.

        Args:
            quantity: ``"grad_norm"``, ``"attention"`` or ``"mlp"``; the latter are angles, given in degrees.
            at_end: take the last measurement of each seed, else the first.
        """
        found = []
        for metrics in self.metrics:
            logged = [(step, values[quantity]) for step, values in metrics.layers.items() if quantity in values]
            found += logged[-1:] if at_end else logged[:1]
        seeds = [values for _, values in found if len(values) == len(found[0][1])]
        if not seeds:
            return None
        values = np.stack(seeds) if quantity == "grad_norm" else np.degrees(np.stack(seeds))
        return _over_seeds(np.arange(1, values.shape[1] + 1), values), found[0][0]


def load_series(out_dir: Path, results: Results) -> list[Series]:
    """Read the metrics of the trials that the report draws, one `Series` a row.

    Args:
        out_dir: the folder that ``geonorm compare`` wrote.
        results: those of one variant.

    Raises:
        UserError: a file of metrics cannot be read.
    """
    rows = results.summary
    series = []
    for row, short, look in zip(rows, short_labels(rows), looks([row.placement for row in rows]), strict=True):
        trials = results.shown_trials(row)
        metrics = [read_metrics(out_dir / "trials" / trial.id / "metrics.jsonl") for trial in trials]
        series.append(Series(row, short, results.trials_of(row), trials, metrics, look))
    return series


def gaps(series: Sequence[Series]) -> list[str]:
    """Sentences on metrics that the figures lack."""
    sentences = []
    for trial, metrics in ((trial, one) for row in series for trial, one in zip(row.trials, row.metrics, strict=True)):
        if not metrics.found:
            sentences.append(f"Trial {trial.id} has no metrics file, so the figures leave it out.")
        elif metrics.skipped:
            lines = counted(metrics.skipped, "unreadable line")
            sentences.append(f"{lines} in the metrics of trial {trial.id}, left out of the figures.")
    return sentences


def read_metrics(path: Path) -> Metrics:
    """Read one ``metrics.jsonl``; a line that is not a row, as a killed trial leaves one, is skipped and counted.

    Args:
        path: the file. It may be absent, which gives empty metrics with ``found`` false.
    """
    rows: dict[str, dict[int, Any]] = {"train": {}, "eval": {}, "layers": {}}
    skipped = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return Metrics(found=False)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line, parse_constant=lambda _: None)
            value = _measured(entry)
            # Where a step stands twice, the later row counts.
            if value is not None:
                rows[entry["kind"]][int(entry["step"])] = value
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            skipped += 1
    # Figures need steps that rise.
    return Metrics(*(dict(sorted(by_step.items())) for by_step in rows.values()), skipped=skipped)


def _measured(entry: dict[str, Any]) -> Any:
    """What the figures draw of a row; None where it holds nothing to draw."""
    kind = entry.get("kind")
    if kind == "layers":
        by_name = {"grad_norm": entry.get("grad_norm"), **(entry.get("angle") or {})}
        # No number, such as an overflow, is null in the file and NaN here.
        return {name: np.array(values, dtype=float).reshape(-1) for name, values in by_name.items() if values}
    loss = entry.get({"train": "loss", "eval": "val_loss"}.get(kind or "", ""))
    return None if loss is None else float(loss)


def top_of_pack(values: Sequence[float]) -> float:
    """The greatest of ``values`` that is not far above the rest: one collapsed row must not set an axis.

    Far is more than four times as far above the least as the median is.
    """
    ranked = sorted(values)
    limit = ranked[0] + max(4 * (ranked[len(ranked) // 2] - ranked[0]), 1e-4)
    return max(value for value in ranked if value <= limit)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean of the same length; at the ends the window shrinks evenly on both sides."""
    count, half = len(values), window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(count)
    reach = np.minimum(half, np.minimum(index, count - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def smoothing_window(series: Sequence[Series]) -> int:
    """Rows to smooth the training loss over: about a twentieth of the longest log, and odd."""
    longest = max((len(metrics.train) for one in series for metrics in one.metrics), default=0)
    return 2 * (longest // 40) + 1


def _over_seeds(x: np.ndarray, values: np.ndarray) -> Curve:
    return Curve(x, values.mean(0), values.min(0), values.max(0))
