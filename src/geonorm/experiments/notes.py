"""What a reader of the results has to know about how they came about."""

from __future__ import annotations

from typing import Any

from geonorm.data import Corpus, Windows
from geonorm.experiments.plan import Plan

_NAMES_SHOWN = 6


def notes(plan: Plan, corpus: Corpus, trials: list[dict[str, Any]], num_trials: int, unnamed: int) -> list[str]:
    """Sentences for the report, from the plan and the trials so far.

    Args:
        plan: the comparison.
        corpus: its text.
        trials: results so far.
        num_trials: how many there will be.
        unnamed: folders of trials in the output folder that this comparison does not name.
    """
    sentences = [_rates(plan), *_inherited(plan)]
    seeds = plan.config.seeds
    if any(len(rates) > 1 for rates in plan.rates) and not plan.config.full_grid and len(seeds) > 1:
        sentences.append(
            f"Seed {seeds[0]} chose each placement's learning rate and the other seeds ran at that rate alone. The "
            "choosing seed is part of the mean, which flatters every row, though not all equally."
        )
    available = Windows(corpus.val, length=plan.training.length).num_windows
    if available < plan.training.eval_windows:
        sentences.append(f"The validation text holds only {available} windows; all of them are used.")
    if len({trial.get("code") for trial in trials if trial["status"] != "failed"}) > 1:
        sentences.append("The trials did not all run on the same version of the code.")
    if len(trials) < num_trials:
        sentences.append(f"The comparison is not finished: {len(trials)} of {num_trials} trials have ended.")
    elif unnamed:
        sentences.append(f"The folder holds {unnamed} more trials that are not part of this comparison.")
    return sentences


def _rates(plan: Plan) -> str:
    source = plan.rate_source()
    if source == "searched":
        return "Each placement was tried at several learning rates and is shown at its own best."
    if source == "given":
        return "All placements were given the same learning rate."
    if source == "tuned":
        return (
            "Each placement runs at a learning rate of its own, because one rate for all decides the ranking. "
            + plan.preset.tuned
        )
    return "The preset's learning rates were not tuned for each placement, so the ranking says little."


def _inherited(plan: Plan) -> list[str]:
    if plan.rate_source() != "tuned":
        return []
    return [
        f"{placement.label()} runs at the rate that was found for {placement.name}."
        for placement in plan.placements
        if placement.label() not in plan.preset.lrs
    ]


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """The corpus in flat form for the results: counts by side, what was skipped and why."""
    description = corpus.description
    names = description["sources"]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    counts = {
        f"{count}_{side}": description[count][side]
        for count in ("num_documents", "num_bytes", "num_tokens")
        for side in ("train", "val")
    }
    skipped = ", ".join(f"{count} x {reason}" for reason, count in description["skipped"].items())
    return {
        "name": ", ".join(names[:_NAMES_SHOWN]) + more,
        **counts,
        "bytes_per_token": description["bytes_per_token"],
        "vocab_size": description["vocab_size"],
        "skipped": skipped or "nothing",
        "notes": " ".join(description["notes"]) or "none",
        "fingerprint": description["fingerprint"],
    }
