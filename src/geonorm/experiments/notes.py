"""What a reader of the results has to know about how they came about."""

from __future__ import annotations

from typing import Any

from geonorm.data import Corpus, Windows
from geonorm.experiments.plan import Plan

_NAMES_SHOWN = 6


def notes(plan: Plan, corpus: Corpus, trials: list[dict[str, Any]], complete: bool, unnamed: int) -> list[str]:
    """Sentences for the report on what its numbers do not show.

    Args:
        plan: the comparison.
        corpus: its text.
        trials: results so far.
        complete: whether all of them have ended.
        unnamed: folders of trials in the output folder that this comparison does not name.
    """
    sentences = _inherited(plan)
    if plan.rate_source() == "tuned" and corpus.description["fingerprint"] != plan.preset.tuning_corpus:
        sentences.append("The rates were found on the standard library of another Python, so on nearly this text.")
    for side, name in (("val", "validation"), ("test", "test")):
        available = Windows(getattr(corpus, side), length=plan.training.length).num_windows
        if available < plan.training.eval_windows:
            sentences.append(f"The {name} text holds only {available} windows; all of them are used.")
    if len({trial.get("code") for trial in trials if trial["status"] != "failed"}) > 1:
        sentences.append("The trials did not all run on the same version of the code.")
    if not complete:
        ended = "1 trial has" if len(trials) == 1 else f"{len(trials)} trials have"
        sentences.append(f"The comparison is not finished: {ended} ended.")
    elif unnamed:
        sentences.append(f"The folder holds {unnamed} more trials that are not part of this comparison.")
    return sentences


def rate_facts(plan: Plan) -> dict[str, Any]:
    """How the learning rates were found and which seeds report, for the results."""
    source = plan.rate_source()
    return {
        "source": source,
        "refined": source == "searched" and plan.config.refine,
        "selection_seed": plan.selection_seed,
        "reporting_seeds": list(plan.reporting_seeds),
        "found": plan.preset.tuned if source == "tuned" else "",
    }


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
        for count in ("num_documents", "num_bytes", "num_tokens", "num_labels")
        if count in description
        for side in ("train", "val", "test")
    }
    for side in ("val", "test"):
        counts |= {
            f"num_groups_{side}": description["num_groups"][side],
            f"largest_share_{side}": description["largest_share"][side],
            f"overlap_{side}": description["overlap"][side],
        }
    counts["overlap_ngram"] = description["overlap"]["ngram"]
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
