"""From trials to a summary: intervals and paired differences, with scipy.

With two seeds or more, intervals are 95 % Student t over seeds. With one, they are 95 % bootstrap over validation
windows, which says how well that one model was measured and nothing about another seed. Differences to the reference
are taken pair by pair, seed with the same seed or window with the same window, because what both share cancels.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from geonorm.experiments.trials import TEST_WINDOWS

REFERENCE = "pre"
_LEVEL = 0.95


def t_interval(values: list[float]) -> list[float] | None:
    """95 % Student t interval of the mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    mean, spread = float(np.mean(values)), float(stats.sem(values))
    if spread == 0:
        return [mean, mean]
    low, high = stats.t.interval(_LEVEL, len(values) - 1, loc=mean, scale=spread)
    return [float(low), float(high)]


def bootstrap_interval(values: np.ndarray) -> list[float] | None:
    """95 % bootstrap interval of the mean of ``[num_windows]`` values; repeatable; None below two values."""
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    result = stats.bootstrap(
        (values,), np.mean, confidence_level=_LEVEL, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)
    )
    return [float(result.confidence_interval.low), float(result.confidence_interval.high)]


def summarize(results: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """Summarise trials by placement and options, best first.

    Rows that lost a seed at their learning rate come after the whole ones, rows without a finished trial last.

    Args:
        results: one dict a trial, as the executor returns them.
        root: folder of the trials' folders, for the losses by window.

    The summary covers the trials at each placement's best learning rate, see :func:`best_lr`.
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["label"]].append(result)
    rows = [_row(label, trials, root) for label, trials in groups.items()]
    # A mean over the seeds that survived is no equal of a mean over all of them, so it stands below those.
    rows.sort(key=lambda row: (row["val_loss_mean"] is None, row["num_lost"] > 0, row["val_loss_mean"] or 0.0))
    reference = _reference(rows)
    for row in rows:
        row["difference"] = _difference(row, reference) if reference else None
        row["behind_best"] = _difference(row, rows[0])
    for row in rows:
        del row["_losses"], row["_windows"]
    return rows


def best_lr(trials: list[dict[str, Any]]) -> float | None:
    """Learning rate of choice for one placement's trials; None if none finished.

    The rate with the fewest trials lost (diverged or failed), and among those the lowest mean validation loss. Only
    seeds that were tried with every rate decide, so that a rate is never chosen for having been run more often.
    """
    by_lr: dict[float, dict[int, dict[str, Any]]] = defaultdict(dict)
    for trial in trials:
        by_lr[trial["lr"]][trial["seed"]] = trial
    shared = set.intersection(*(set(group) for group in by_lr.values())) if by_lr else set()
    ranks = {}
    for lr, group in by_lr.items():
        losses = [group[seed]["val_loss"] for seed in shared if group[seed]["status"] == "ok"]
        if losses:
            ranks[lr] = (len(shared) - len(losses), float(np.mean(losses)))
    return min(ranks, key=lambda lr: ranks[lr]) if ranks else None


def _reference(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The best Pre-Norm of the comparison, its variants included; None without one. ``rows`` come best first."""
    return next((row for row in rows if row["placement"] == REFERENCE and row["val_loss_mean"] is not None), None)


def _row(label: str, trials: list[dict[str, Any]], root: Path) -> dict[str, Any]:
    lr = best_lr(trials)
    at_lr = sorted((trial for trial in trials if trial["lr"] == lr), key=lambda trial: trial["seed"])
    chosen = [trial for trial in at_lr if trial["status"] == "ok"]
    losses = {trial["seed"]: trial["val_loss"] for trial in chosen}
    windows = {trial["seed"]: _window_losses(root / trial["id"]) for trial in chosen}
    interval, kind = t_interval(list(losses.values())), "seeds"
    if len(chosen) == 1 and (first := next(iter(windows.values()))) is not None:
        interval, kind = bootstrap_interval(first), "windows"
    tried = sorted({trial["lr"] for trial in trials})
    return {
        "label": label,
        "placement": trials[0]["placement"],
        "options": trials[0]["options"],
        "best_lr": lr,
        "val_loss_mean": float(np.mean(list(losses.values()))) if losses else None,
        "val_loss_ci": interval,
        "ci_kind": kind,
        "val_bits_per_byte_mean": float(np.mean([t["val_bits_per_byte"] for t in chosen])) if chosen else None,
        "num_seeds": len(chosen),
        "num_lost": len(at_lr) - len(chosen),
        "lrs_tried": tried,
        "lr_at_edge": lr is not None and len(tried) > 1 and lr in (tried[0], tried[-1]),
        "num_diverged": sum(trial["status"] == "diverged" for trial in trials),
        "num_failed": sum(trial["status"] == "failed" for trial in trials),
        "_losses": losses,
        "_windows": windows,
    }


def _difference(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any] | None:
    if row is reference or not row["_losses"]:
        return None
    shared = sorted(row["_losses"].keys() & reference["_losses"].keys())
    if not shared:
        return None
    by_seed = [row["_losses"][seed] - reference["_losses"][seed] for seed in shared]
    difference = {"reference": reference["label"], "mean": float(np.mean(by_seed)), "kind": "paired seeds"}
    if len(shared) > 1:
        return {**difference, "ci": t_interval(by_seed)}
    mine, theirs = row["_windows"][shared[0]], reference["_windows"][shared[0]]
    if mine is None or theirs is None or len(mine) != len(theirs):
        return {**difference, "ci": None}
    return {**difference, "ci": bootstrap_interval(mine - theirs), "kind": "paired windows"}


def _window_losses(folder: Path) -> np.ndarray | None:
    try:
        return np.array(json.loads((folder / TEST_WINDOWS).read_text(encoding="utf-8"))["loss"])
    except (OSError, json.JSONDecodeError):
        return None
