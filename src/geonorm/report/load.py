"""Read a run folder: the results file and the metrics of every trial in it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geonorm.errors import UserError
from geonorm.report.format import short_labels

RESULTS_KEYS = {
    "trials": list,
    "summary": list,
    "environment": dict,
    "settings": dict,
    "corpus": dict,
    "command": str,
    "notes": list,
}
TRIAL_KEYS = ("id", "placement", "options", "seed", "lr", "status")
SUMMARY_KEYS = ("label", "placement", "options", "val_loss_mean")
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
    """One row of the summary with the finished trials at its best learning rate.

    Attributes:
        row: the summary row.
        short: its placement with only those options that tell it from other rows of the same placement.
        every: all trials of this row, at every learning rate and with every status.
        trials: the finished trials at the best learning rate, one a seed.
        metrics: what each of ``trials`` logged, in the same order.
    """

    row: dict[str, Any]
    short: str
    every: list[dict[str, Any]]
    trials: list[dict[str, Any]]
    metrics: list[Metrics]


@dataclass(frozen=True)
class Run:
    """A run folder in memory: ``results.json`` and one `Series` a summary row, best first."""

    results: dict[str, Any]
    series: list[Series]
    remarks: list[str]


def load_run(out_dir: Path) -> Run:
    """Read ``results.json`` and the metrics of the trials that the report draws.

    Args:
        out_dir: the folder that ``geonorm compare`` wrote.

    Raises:
        UserError: the results file is missing, is not JSON, or lacks a part.
    """
    path = Path(out_dir) / "results.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"no results.json in {out_dir}: give the folder that `geonorm compare` wrote its results to"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        results = json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON (line {error.lineno}: {error.msg}); run the comparison again to rewrite it"
        ) from None
    check_results(results, str(path))

    rows = ranked(results)
    series, remarks = [], []
    for row, short in zip(rows, short_labels(rows), strict=True):
        every = trials_of(results, row)
        trials = best_trials(row, every)
        metrics = [read_metrics(Path(out_dir) / "trials" / trial["id"] / "metrics.jsonl") for trial in trials]
        series.append(Series(row, short, every, trials, metrics))
        for trial, one in zip(trials, metrics, strict=True):
            if not one.found:
                remarks.append(f"Trial {trial['id']} has no metrics file, so the figures leave it out.")
            elif one.skipped:
                lines = "1 unreadable line" if one.skipped == 1 else f"{one.skipped} unreadable lines"
                remarks.append(f"{lines} in the metrics of trial {trial['id']}, left out of the figures.")
    return Run(results, series, remarks)


def check_results(results: Any, where: str = "results") -> None:
    """Check that every part that the report needs is there and of the right type.

    Raises:
        UserError: a part is missing or of another type; the message names it.
    """
    if not isinstance(results, dict):
        raise UserError(f"{where} must hold a JSON object, got {type(results).__name__}")
    for key, kind in RESULTS_KEYS.items():
        if not isinstance(results.get(key), kind):
            problem = "has no" if key not in results else f"needs a JSON {kind.__name__} under"
            raise UserError(f"{where} {problem} `{key}`; run the comparison again to rewrite it")
    for part, keys in (("trials", TRIAL_KEYS), ("summary", SUMMARY_KEYS)):
        for index, entry in enumerate(results[part]):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise UserError(f"{where}: `{part}[{index}]` has no `{missing[0]}`; run the comparison again")
    for trial in results["trials"]:
        if not isinstance(trial["id"], str) or Path(trial["id"]).name != trial["id"]:
            raise UserError(f"{where}: trial id {trial['id']!r} must be a plain folder name")


def ranked(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the summary, lowest validation loss first; those that lost a seed next, without any result last."""
    return sorted(
        results["summary"],
        key=lambda row: (row["val_loss_mean"] is None, bool(row.get("num_lost")), row["val_loss_mean"] or 0.0),
    )


def trials_of(results: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Every trial of one summary row: the same placement with the same options."""
    return [
        trial
        for trial in results["trials"]
        if trial["placement"] == row["placement"] and trial["options"] == row["options"]
    ]


def best_trials(row: dict[str, Any], trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``trials`` that finished at the row's best learning rate, by seed."""
    best = row.get("best_lr")
    if best is None:
        return []
    chosen = [t for t in trials if t["status"] == "ok" and math.isclose(t["lr"], best, rel_tol=1e-9)]
    return sorted(chosen, key=lambda trial: trial["seed"])


def read_metrics(path: Path) -> Metrics:
    """Read one ``metrics.jsonl``; a line that is not a JSON object, as a killed trial leaves, is skipped and counted.

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
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            skipped += 1
        elif entry.get("kind") in rows:
            rows[entry["kind"]].append(entry)
    for kind in rows:
        # Figures need steps that rise; where a step stands twice, the later row counts.
        rows[kind] = [by_step for _, by_step in sorted({row["step"]: row for row in rows[kind]}.items())]
    return Metrics(rows["train"], rows["eval"], rows["layers"], skipped)
