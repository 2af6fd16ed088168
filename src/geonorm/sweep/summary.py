"""From trials to the rows of a comparison: losses, differences to the reference, verdicts; see docs/comparisons.md.

What is chosen (a rate, the reference) is chosen by the validation loss; what is shown is the loss on the test text.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.report.results import FEWEST_DOCUMENTS, FEWEST_SEEDS, Difference, Row, Trial, Variant
from geonorm.sweep.rates import best_lr, is_tuned
from geonorm.sweep.statistics import Estimate, estimate, holm_levels
from geonorm.training.folder import TEST_WINDOWS

REFERENCE = "pre"


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
class _Placement:
    """One placement with its options: the trials that are shown and what they measured on the test text."""

    trials: list[Trial]
    lr: float | None
    shown: list[Trial]
    num_reporting: int
    num_lost: int
    tuned: bool
    windows: dict[int, np.ndarray]
    documents: np.ndarray | None
    labels: np.ndarray | None

    @property
    def label(self) -> str:
        return self.trials[0].label

    @property
    def num_documents(self) -> int:
        return 0 if self.documents is None else len(np.unique(self.documents))

    @property
    def test_loss(self) -> float | None:
        losses = [trial.test_loss for trial in self.shown if trial.test_loss is not None]
        return float(np.mean(losses)) if losses else None

    @property
    def val_loss(self) -> float | None:
        losses = [trial.val_loss for trial in self.ended_well if trial.val_loss is not None]
        return float(np.mean(losses)) if losses else None

    @property
    def ended_well(self) -> list[Trial]:
        """The trials at the chosen rate that ended well, with the seed that chose."""
        return [trial for trial in self.trials if trial.lr == self.lr and trial.status == "ok"]


def summarize(
    trials: Iterable[Trial], root: Path, design: Design, variants: dict[str, dict[str, Any]] | None = None
) -> tuple[tuple[Row, ...], tuple[Variant, ...]]:
    """Summarise trials by variant, placement and options.

    Args:
        trials: those that have ended.
        root: folder of the trials' folders, for the losses by window.
        design: what the seeds are for.
        variants: varied keys with their values, by name of the variant; None for one without a name.

    Returns:
        Rows: variant by variant, in each lowest test loss first, rows that lost a seed after the whole ones and rows
        without a loss last. Variants: each with its reference, the Pre-Norm of the lowest validation loss (of the seed
        that chose, where one did). Intervals of differences are corrected for all rows of all variants together.
    """
    groups: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.variant, trial.label].append(trial)
    found = [_row(mine, root, design) for mine in groups.values()]
    rows, references = [], []
    pairs: list[tuple[_Placement, _Placement]] = []
    for name, values in (variants or {"": {}}).items():
        mine = [row for row in found if row.trials[0].variant == name]
        reference = _reference(mine, design.selection_seed)
        references.append(Variant(name, values, reference.label if reference else None))
        if reference is not None:
            pairs += [(row, reference) for row in mine if row is not reference and row.shown]
        # A mean over the seeds that survived is no equal of a mean over all of them, so it stands below those.
        rows += sorted(mine, key=lambda row: (row.test_loss is None, row.num_lost > 0, row.test_loss or 0.0))
    judged = _judged(pairs, design)
    return tuple(_output(row, *judged.get(id(row), (None, None, ()))) for row in rows), tuple(references)


def _row(trials: list[Trial], root: Path, design: Design) -> _Placement:
    label, seed = trials[0].label, design.selection_seed
    if seed is None:
        lr, tuned = trials[0].lr, label in design.tuned
    else:
        lr, tuned = best_lr(trials, seed), is_tuned(trials, seed)
    at_lr = sorted((trial for trial in trials if trial.lr == lr), key=lambda trial: trial.seed)
    reporting = [trial for trial in at_lr if trial.seed in design.reporting_seeds]
    finished = [trial for trial in reporting if trial.status == "ok"]
    # Before any other seed has run, or without one, the seed that chose is all there is to show.
    shown = finished if reporting else [trial for trial in at_lr if trial.status == "ok"]
    windows, documents, labels = _windows([root / trial.id for trial in shown])
    by_seed = {trial.seed: one for trial, one in zip(shown, windows, strict=True)} if windows else {}
    if not windows:
        by_seed = {trial.seed: np.array([trial.test_loss]) for trial in shown}
    return _Placement(
        trials, lr, shown, len(finished), len(reporting) - len(finished), tuned, by_seed, documents, labels
    )


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


def _reference(rows: list[_Placement], selection_seed: int | None) -> _Placement | None:
    """The best Pre-Norm by the seed that chooses: chosen by seeds that report, it would look better than it is."""
    candidates = [row for row in rows if row.trials[0].placement == REFERENCE and row.shown]

    def loss(row: _Placement) -> float:
        chosen = [t.val_loss for t in row.ended_well if t.seed == selection_seed and t.val_loss is not None]
        return chosen[0] if chosen else row.val_loss or 0.0

    return min(candidates, key=lambda row: (row.num_lost > 0, loss(row))) if candidates else None


def _output(row: _Placement, difference: Difference | None, verdict: str | None, no_verdict: tuple[str, ...]) -> Row:
    first = row.trials[0]
    found = estimate(np.stack(list(row.windows.values())), row.documents, row.labels) if row.shown else None
    bits = [trial.test_bits_per_byte for trial in row.shown if trial.test_bits_per_byte is not None]
    interval = found.interval() if found else None
    return Row(
        variant=first.variant,
        label=row.label,
        placement=first.placement,
        options=first.options,
        best_lr=row.lr if row.shown else None,
        test_loss_mean=row.test_loss,
        test_loss_ci=interval,
        ci_kind=found.kind if found else "",
        test_bits_per_byte_mean=float(np.mean(bits)) if bits else None,
        num_seeds=row.num_reporting,
        num_lost=row.num_lost,
        lrs_tried=tuple(sorted({trial.lr for trial in row.trials})),
        tuned=row.tuned,
        difference=difference,
        verdict=verdict,
        no_verdict=no_verdict,
        num_documents=row.num_documents,
    )


def _judged(
    pairs: list[tuple[_Placement, _Placement]], design: Design
) -> dict[int, tuple[Difference | None, str | None, tuple[str, ...]]]:
    """Each row's difference to its reference and the verdict or why there is none, by identity of the row."""
    judged: dict[int, tuple[Difference | None, str | None, tuple[str, ...]]] = {}
    compared = []
    for row, reference in pairs:
        found, num_seeds = _paired(row, reference)
        if found is None:
            judged[id(row)] = None, None, ("no seed shared",)
        else:
            compared.append((row, found, num_seeds, _no_verdict(row, reference, num_seeds, design)))
    levels = holm_levels([found.p_value() for _, found, _, _ in compared])
    for (row, found, num_seeds, why), level in zip(compared, levels, strict=True):
        corrected = found.interval(level)
        difference = Difference(found.mean, found.interval(), corrected, found.kind, num_seeds)
        if why:
            verdict = None
        elif corrected is None or corrected[0] <= 0 <= corrected[1]:
            verdict = "no difference shown"
        else:
            verdict = "better" if found.mean < 0 else "worse"
        judged[id(row)] = difference, verdict, why
    return judged


def _paired(row: _Placement, reference: _Placement) -> tuple[Estimate | None, int]:
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


def _no_verdict(row: _Placement, reference: _Placement, num_seeds: int, design: Design) -> tuple[str, ...]:
    """Why no verdict can be given on a row, the first reason that holds; empty if one can."""
    if not design.complete:
        return ("not finished",)
    if row.num_lost or reference.num_lost:
        return ("seed lost" if row.num_lost else "reference lost a seed",)
    if num_seeds < FEWEST_SEEDS:
        return ("few seeds",)
    if not (row.tuned and reference.tuned):
        return (*["not tuned"][row.tuned :], *["reference not tuned"][reference.tuned :])
    return ("few documents",) if row.num_documents < FEWEST_DOCUMENTS else ()
