"""Read a run folder: the results file and the metrics of every trial in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from geonorm.errors import UserError
from geonorm.report import style
from geonorm.report.format import short_labels
from geonorm.report.results import Results, Row, Trial, read_results

KINDS = ("train", "eval", "layers")


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
    look: style.Look


@dataclass(frozen=True)
class Run:
    """A run folder in memory: ``results.json`` and one `Series` a summary row, in its order."""

    results: Results
    series: list[Series]
    remarks: list[str]


def load_run(out_dir: Path) -> Run:
    """Read ``results.json`` and the metrics of the trials that the report draws.

    Args:
        out_dir: the folder that ``geonorm compare`` wrote.

    Raises:
        UserError: what `read_results` raises, or a file of metrics cannot be read.
    """
    results = read_results(out_dir)
    rows = results.summary
    series, remarks = [], []
    looks = style.looks([row.placement for row in rows])
    for row, short, look in zip(rows, short_labels(rows), looks, strict=True):
        trials = results.shown_trials(row)
        metrics = [read_metrics(Path(out_dir) / "trials" / trial.id / "metrics.jsonl") for trial in trials]
        series.append(Series(row, short, results.trials_of(row), trials, metrics, look))
        for trial, one in zip(trials, metrics, strict=True):
            if not one.found:
                remarks.append(f"Trial {trial.id} has no metrics file, so the figures leave it out.")
            elif one.skipped:
                lines = "1 unreadable line" if one.skipped == 1 else f"{one.skipped} unreadable lines"
                remarks.append(f"{lines} in the metrics of trial {trial.id}, left out of the figures.")
    return Run(results, series, remarks)


def read_metrics(path: Path) -> Metrics:
    """Read one ``metrics.jsonl``; a line that is not a row, as a killed trial leaves one, is skipped and counted.

    Args:
        path: the file. It may be absent, which gives empty metrics with ``found`` false.
    """
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    skipped = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return Metrics(found=False)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line, parse_constant=lambda _: None)
        except (json.JSONDecodeError, RecursionError):
            entry = None
        if not _is_row(entry):
            skipped += 1
        elif entry.get("kind") in rows:
            rows[entry["kind"]].append(entry)
    for kind in rows:
        # Figures need steps that rise; where a step stands twice, the later row counts.
        rows[kind] = [by_step for _, by_step in sorted({row["step"]: row for row in rows[kind]}.items())]
    return Metrics(rows["train"], rows["eval"], rows["layers"], skipped)


def _is_row(entry: Any) -> TypeGuard[dict[str, Any]]:
    """True for a row that the figures can draw: a step, and numbers or nothing where they look for numbers."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    values = [entry.get("val_loss"), entry.get("loss")]
    angle = entry.get("angle") or {}
    if entry.get("kind") == "layers":
        lists = [entry.get("grad_norm"), *(angle.values() if isinstance(angle, dict) else [angle])]
        if not all(one is None or isinstance(one, list) for one in lists):
            return False
        values += [value for one in lists for value in one or ()]
    return all(value is None or (isinstance(value, (int, float)) and value == value) for value in values)
