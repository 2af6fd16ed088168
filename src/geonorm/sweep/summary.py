"""From trials to the rows of a comparison: losses, differences to the reference, verdicts; see docs/comparisons.md.

What is chosen (a rate, the reference) is chosen by the validation loss; what is shown is the loss on the test text.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.experiments.rates import best_lr, is_tuned
from geonorm.experiments.statistics import Estimate, estimate, holm_levels
from geonorm.experiments.trials import TEST_WINDOWS

REFERENCE = "pre"
FEWEST_SEEDS = 3
FEWEST_DOCUMENTS = 8


@dataclasses.dataclass(frozen=True)
class Design:
    """What the seeds of a comparison are for.

    Attributes:
        reporting_seeds: those whose losses are shown.
        selection_seed: the one that chose the rates and is not among them; None where nothing was searched.
        tuned: labels of placements whose rates were found to a factor of sqrt(2) beforehand.
        complete: every trial has ended.
    """

    reporting_seeds: tuple[int, ...]
    selection_seed: int | None = None
    tuned: frozenset[str] = frozenset()
    complete: bool = True


@dataclasses.dataclass
class _Row:
    """One placement with its options: the trials that are shown and what they measured on the test text."""

    trials: list[dict[str, Any]]
    lr: float | None
    shown: list[dict[str, Any]]
    num_reporting: int
    num_lost: int
    tuned: bool
    windows: dict[int, np.ndarray]
    documents: np.ndarray | None
    labels: np.ndarray | None

    @property
    def label(self) -> str:
        return self.trials[0]["label"]

    @property
    def val_loss(self) -> float | None:
        losses = [trial["val_loss"] for trial in self.ended_well]
        return float(np.mean(losses)) if losses else None

    @property
    def ended_well(self) -> list[dict[str, Any]]:
        """The trials at the chosen rate that ended well, with the seed that chose."""
        return [trial for trial in self.trials if trial["lr"] == self.lr and trial["status"] == "ok"]


def summarize(results: list[dict[str, Any]], root: Path, design: Design) -> dict[str, Any]:
    """Summarise trials by placement and options.

    Args:
        results: one dict a trial, as the executor returns them.
        root: folder of the trials' folders, for the losses by window.
        design: what the seeds are for.

    Returns:
        ``summary``, one dict a row, lowest test loss first, rows that lost a seed after the whole ones and rows without
        a loss last; ``reference``, the label of the row that differences are taken to, the Pre-Norm of the lowest
        validation loss (of the seed that chose, where one did), or None.
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["label"]].append(result)
    rows = [_row(trials, root, design) for trials in groups.values()]
    reference = _reference(rows, design.selection_seed)
    output = [_output(row) for row in rows]
    if reference is not None:
        _add_differences(rows, output, reference, design)
    # A mean over the seeds that survived is no equal of a mean over all of them, so it stands below those.
    output.sort(key=lambda row: (row["test_loss_mean"] is None, row["num_lost"] > 0, row["test_loss_mean"] or 0.0))
    return {"summary": output, "reference": reference.label if reference else None}


def _row(trials: list[dict[str, Any]], root: Path, design: Design) -> _Row:
    label, seed = trials[0]["label"], design.selection_seed
    if seed is None:
        lr, tuned = trials[0]["lr"], label in design.tuned
    else:
        lr, tuned = best_lr(trials, seed), is_tuned(trials, seed)
    at_lr = sorted((trial for trial in trials if trial["lr"] == lr), key=lambda trial: trial["seed"])
    reporting = [trial for trial in at_lr if trial["seed"] in design.reporting_seeds]
    finished = [trial for trial in reporting if trial["status"] == "ok"]
    # Before any other seed has run, or without one, the seed that chose is all there is to show.
    shown = finished if reporting else [trial for trial in at_lr if trial["status"] == "ok"]
    windows, documents, labels = _windows([root / trial["id"] for trial in shown])
    by_seed = {trial["seed"]: one for trial, one in zip(shown, windows, strict=True)} if windows else {}
    if not windows:
        by_seed = {trial["seed"]: np.array([trial["test_loss"]]) for trial in shown}
    return _Row(trials, lr, shown, len(finished), len(reporting) - len(finished), tuned, by_seed, documents, labels)


def _windows(folders: list[Path]) -> tuple[list[np.ndarray], np.ndarray | None, np.ndarray | None]:
    """Losses by window of each trial, and of the windows the documents and, unless all alike, the numbers of labels.

    Nothing if some are missing or do not fit together.
    """
    losses, documents, labels = [], [], []
    for folder in folders:
        try:
            content = json.loads((folder / TEST_WINDOWS).read_text(encoding="utf-8"))
            losses.append(np.array(content["loss"], dtype=float))
            documents.append(np.array(content["document"], dtype=int))
            labels.append(np.array(content.get("labels", [1] * len(content["loss"])), dtype=int))
        except (OSError, ValueError, KeyError, TypeError):
            return [], None, None
    alike = all(np.array_equal(one, kind[0]) for kind in (documents, labels) for one in kind)
    shapes = {one.shape for one in (*losses, *documents, *labels)}
    if not losses or not alike or len(shapes) != 1 or not all(np.isfinite(one).all() for one in losses):
        return [], None, None
    return losses, documents[0], None if (labels[0] == labels[0][0]).all() else labels[0]


def _reference(rows: list[_Row], selection_seed: int | None) -> _Row | None:
    """The best Pre-Norm by the seed that chooses: chosen by seeds that report, it would look better than it is."""
    candidates = [row for row in rows if row.trials[0]["placement"] == REFERENCE and row.shown]

    def loss(row: _Row) -> float:
        chosen = [t["val_loss"] for t in row.ended_well if t["seed"] == selection_seed]
        return chosen[0] if chosen else row.val_loss or 0.0

    return min(candidates, key=lambda row: (row.num_lost > 0, loss(row))) if candidates else None


def _output(row: _Row) -> dict[str, Any]:
    first = row.trials[0]
    found = estimate(np.stack(list(row.windows.values())), row.documents, row.labels) if row.shown else None
    bits = [trial["test_bits_per_byte"] for trial in row.shown if trial["test_bits_per_byte"] is not None]
    return {
        "label": row.label,
        "placement": first["placement"],
        "options": first["options"],
        "best_lr": row.lr if row.shown else None,
        "val_loss_mean": row.val_loss,
        "test_loss_mean": float(np.mean([trial["test_loss"] for trial in row.shown])) if row.shown else None,
        "test_loss_ci": found.interval() if found else None,
        "ci_kind": found.kind if found else "",
        "test_bits_per_byte_mean": float(np.mean(bits)) if bits else None,
        "num_seeds": row.num_reporting,
        "num_lost": row.num_lost,
        "lrs_tried": sorted({trial["lr"] for trial in row.trials}),
        "tuned": row.tuned,
        "difference": None,
        "verdict": None,
        "no_verdict": None,
    }


def _add_differences(rows: list[_Row], output: list[dict[str, Any]], reference: _Row, design: Design) -> None:
    """Add to every row its difference to the reference and the verdict or why there is none."""
    pairs = [(row, entry) for row, entry in zip(rows, output, strict=True) if row is not reference and row.shown]
    compared = [(entry, row, *_paired(row, reference)) for row, entry in pairs]
    found = [(entry, row, one, num_seeds) for entry, row, one, num_seeds in compared if one is not None]
    levels = holm_levels([one.p_value() for _, _, one, _ in found])
    for (entry, row, one, num_seeds), level in zip(found, levels, strict=True):
        corrected = one.interval(level)
        entry["difference"] = {
            "mean": one.mean,
            "ci": one.interval(),
            "ci_corrected": corrected,
            "kind": one.kind,
            "num_seeds": num_seeds,
        }
        why = _no_verdict(row, reference, num_seeds, design)
        if why:
            entry["no_verdict"] = why
        elif corrected is None or corrected[0] <= 0 <= corrected[1]:
            entry["verdict"] = "no difference shown"
        else:
            entry["verdict"] = "better" if one.mean < 0 else "worse"


def _paired(row: _Row, reference: _Row) -> tuple[Estimate | None, int]:
    """The mean difference, seed with the same seed and window with the same window, and the reporting seeds in it."""
    shared = sorted(row.windows.keys() & reference.windows.keys())
    if not shared:
        return None, 0
    mine, theirs = (np.stack([one.windows[seed] for seed in shared]) for one in (row, reference))
    documents, labels = row.documents, row.labels
    same = all(
        np.array_equal(one, other)  # type: ignore[arg-type]
        for one, other in ((documents, reference.documents), (labels, reference.labels))
    )
    if mine.shape != theirs.shape or not same:
        means = (np.average(one, axis=1, weights=of.labels) for one, of in ((mine, row), (theirs, reference)))
        (mine, theirs), documents, labels = (one[:, None] for one in means), None, None
    reporting = len(shared) if row.num_reporting and reference.num_reporting else 0
    return estimate(mine - theirs, documents, labels), reporting


def _no_verdict(row: _Row, reference: _Row, num_seeds: int, design: Design) -> str | None:
    """Why no verdict can be given on a row, in words that go on after "no verdict:"; None if one can."""
    if not design.complete:
        return "the comparison is not finished"
    if row.num_lost or reference.num_lost:
        return f"{'a seed' if row.num_lost else 'a seed of the reference'} was lost"
    if num_seeds < FEWEST_SEEDS:
        return f"reporting seeds shared with the reference: {num_seeds}, needed: {FEWEST_SEEDS}"
    untuned = [name for name, one in (("its", row), ("the reference's", reference)) if not one.tuned]
    if untuned:
        return f"{' and '.join(untuned)} learning rate was not searched to a factor of sqrt(2)"
    count = 0 if row.documents is None else len(np.unique(row.documents))
    if count < FEWEST_DOCUMENTS:
        return f"documents in the windows of the test text: {count}, needed: {FEWEST_DOCUMENTS}"
    return None
