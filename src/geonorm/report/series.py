"""The rows of a comparison with what their trials logged: what the figures draw."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from geonorm.errors import UserError
from geonorm.report.format import counted, short_labels
from geonorm.report.results import Results, Row, Trial
from geonorm.report.style import Look, looks


@dataclass(frozen=True)
class Metrics:
    """The rows of one ``metrics.jsonl``, by kind, each in the order of its steps."""

    train: list[dict[str, Any]] = field(default_factory=list)
    eval: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
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


def gaps(series: list[Series]) -> list[str]:
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
    # Figures need steps that rise; where a step stands twice, the later row counts.
    rows: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "eval": {}, "layers": {}}
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
        except (json.JSONDecodeError, RecursionError):
            entry = None
        if not _is_row(entry):
            skipped += 1
        elif entry.get("kind") in rows:
            rows[entry["kind"]][entry["step"]] = entry
    by_step = {kind: [row for _, row in sorted(found.items())] for kind, found in rows.items()}
    return Metrics(**by_step, skipped=skipped)


def _is_row(entry: Any) -> TypeGuard[dict[str, Any]]:
    """True for a row that the figures can draw: a step, and numbers or nothing where they look for numbers."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    values = [entry.get("val_loss"), entry.get("loss")]
    if entry.get("kind") == "layers":
        angle = entry.get("angle") or {}
        lists = [entry.get("grad_norm"), *(angle.values() if isinstance(angle, dict) else [angle])]
        if not all(one is None or isinstance(one, list) for one in lists):
            return False
        values += [value for one in lists for value in one or ()]
    return all(value is None or (isinstance(value, (int, float)) and value == value) for value in values)
