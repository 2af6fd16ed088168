"""The sentences of the report: what the run found, and what it does not show."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from scipy import stats

from geonorm.report.format import (
    PROSE_NAMES,
    counted,
    learning_rate,
    listing,
    loss_digits,
    number,
    prose_name,
    rows_counted,
)
from geonorm.report.load import ranked, trials_of
from geonorm.report.table import interval_kinds, reference_row


@dataclass(frozen=True)
class Finding:
    """What a run found, in sentences.

    Attributes:
        headline: one line without a full stop.
        sentences: the paragraph under it.
        doubts: what a reader must hold against it, one sentence or two each.
    """

    headline: str
    sentences: list[str]
    doubts: list[str]


def describe(results: dict[str, Any]) -> Finding:
    """Write the finding of a run from its numbers alone.

    Args:
        results: the content of ``results.json``.
    """
    rows = ranked(results)
    done = [row for row in rows if row["val_loss_mean"] is not None]
    if not done:
        headline = "No trial finished, so there is nothing to compare"
        return Finding(headline, ["The table of all trials says why each one ended."], _doubts(results, rows, done))
    if len(done) == 1:
        name = prose_name(done[0], rows)
        digits = loss_digits(rows)
        loss = number(done[0]["val_loss_mean"], digits)
        sentences = [f"{name} ends at a validation loss of {loss} nats per token."]
        if len(rows) > 1:
            others = listing([prose_name(row, rows) for row in rows[1:]])
            sentences.append(f"No trial of {others} finished.")
        headline = f"Only {name} finished, so there is nothing to compare it with"
        if len(rows) == 1:
            headline = f"{name} ends at {loss} nats per token; nothing was compared with it"
        return Finding(headline, sentences, _doubts(results, rows, done))
    return Finding(_headline(rows, done), _sentences(rows, done), _doubts(results, rows, done))


def excludes_zero(difference: dict[str, Any] | None) -> bool | None:
    """Whether the interval of a difference lies wholly on one side of zero; None where there is no interval."""
    if not difference or not difference.get("ci"):
        return None
    low, high = difference["ci"]
    return low > 0 or high < 0


def _headline(rows: list[dict[str, Any]], done: list[dict[str, Any]]) -> str:
    best, digits = done[0], loss_digits(rows)
    name, reference = prose_name(best, rows), reference_row(rows)
    loser = _geonorm_loses(rows, done)
    second = done[1]
    tail = f"; {loser}" if loser else ""
    if second is not reference and excludes_zero(second.get("behind_best")) is False:
        tail = f", but not clearly below {prose_name(second, rows)}{tail}"
    if best is reference:
        return f"No placement ends below {name} here"
    difference = best.get("difference")
    if reference is None or difference is None:
        return f"{name} has the lowest validation loss, {number(best['val_loss_mean'], digits)} nats{tail}"
    other = prose_name(reference, rows)
    if difference["mean"] >= 0:
        return f"{name} has the lowest mean loss, but not on what it shares with {other}{tail}"
    if excludes_zero(difference) is False:
        return f"{name} has the lowest loss, but its lead over {other} is within the noise{tail}"
    seeds = ", on one seed each" if all(row.get("num_seeds") == 1 for row in (best, reference)) else ""
    return f"{name} ends {number(abs(difference['mean']), digits)} nats below {other}{seeds}{tail}"


def _geonorm_loses(rows: list[dict[str, Any]], done: list[dict[str, Any]]) -> str:
    if done[0]["placement"] == "geonorm" or all(row["placement"] != "geonorm" for row in rows):
        return ""
    if all(row["placement"] != "geonorm" for row in done):
        return "GeoNorm has no finished trial"
    return "GeoNorm does not win"


def _sentences(rows: list[dict[str, Any]], done: list[dict[str, Any]]) -> list[str]:
    best, second, digits = done[0], done[1], loss_digits(rows)
    reference = reference_row(rows)
    sentences = [
        f"{prose_name(best)} has the lowest validation loss of {rows_counted(done)}"
        f"{' that finished' if len(done) < len(rows) else ''}: {number(best['val_loss_mean'], digits)} nats per token"
        f" at learning rate {learning_rate(best.get('best_lr'))}."
    ]
    if best is reference:
        if second.get("difference"):
            sentences.append(f"The nearest, {prose_name(second)}, {_compared(second, prose_name(best, rows), digits)}")
    else:
        if best.get("difference") and reference is not None:
            sentences.append(f"It {_compared(best, prose_name(reference), digits)}")
        elif reference is not None and reference["val_loss_mean"] is None:
            sentences.append(f"{prose_name(reference)} has no finished trial, so there is no difference to it.")
        elif reference is not None:
            gap = number(reference["val_loss_mean"] - best["val_loss_mean"], digits)
            sentences.append(f"It ends {gap} nats below {prose_name(reference)}; the run gives no interval for this.")
        if second is not reference:
            if second.get("behind_best"):
                compared = _compared(second, prose_name(best, rows), digits, "behind_best")
                sentences.append(f"The runner-up, {prose_name(second)}, {compared}")
            else:
                gap = number(second["val_loss_mean"] - best["val_loss_mean"], digits)
                sentences.append(
                    f"The runner-up, {prose_name(second)}, is {gap} nats behind; "
                    "between these two the run gives no interval."
                )
    sentences += _geonorm_sentences(rows, done, digits)
    edge = _at_edge(done)
    if edge:
        verb, them = ("does", "it") if len(edge) == 1 else ("do", "them")
        sentences.append(
            f"{listing([prose_name(row) for row in edge])} {verb} best at the edge of the learning rates tried, "
            f"so the comparison is not settled for {them}."
        )
    if interval_kinds(done) == {"windows"}:
        sentences.append(
            "The intervals come from the validation windows of one trained model each and do not contain "
            "the variation from seed to seed."
        )
    return sentences


def _compared(row: dict[str, Any], reference: str, digits: int, key: str = "difference") -> str:
    difference = row[key]
    mean, side = difference["mean"], "below" if difference["mean"] < 0 else "above"
    text = f"ends {number(abs(mean), digits)} nats {side} {reference}"
    apart = excludes_zero(difference)
    if apart is None:
        return f"{text}; there is no interval for this difference."
    low, high = (_minus(f"{bound:+.{digits}f}") for bound in difference["ci"])
    verdict = "excludes zero" if apart else f"includes zero, so this run does not tell it from {reference}"
    return f"{text}; the 95% interval of the difference, {low} to {high} over {difference['kind']}, {verdict}."


def _geonorm_sentences(rows: list[dict[str, Any]], done: list[dict[str, Any]], digits: int) -> list[str]:
    if not _geonorm_loses(rows, done):
        return []
    ours = next((row for row in done if row["placement"] == "geonorm"), None)
    if ours is None:
        return ["No GeoNorm trial finished, so this run says nothing about its loss."]
    gap = ours["val_loss_mean"] - done[0]["val_loss_mean"]
    text = f"GeoNorm does not win: {prose_name(ours)} is {number(gap, digits)} nats above the best"
    reference = reference_row(rows)
    if ours.get("difference") and reference is not None:
        if done[0] is not reference:
            return [f"{text} and {_compared(ours, prose_name(reference), digits)}"]
        # The sentence on the runner-up has given its difference and interval.
        if ours is not done[1]:
            return [f"GeoNorm does not win: {prose_name(ours)} {_compared(ours, prose_name(reference), digits)}"]
    return [f"{text}."]


def _at_edge(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in done if row.get("lr_at_edge") and len(row.get("lrs_tried") or []) > 1]


def _doubts(results: dict[str, Any], rows: list[dict[str, Any]], done: list[dict[str, Any]]) -> list[str]:
    doubts = []
    kinds = interval_kinds(done)
    if "windows" in kinds:
        doubts.append(
            f"Intervals over windows resample the validation windows of one trained model{_held_out(results)}. They "
            "say nothing of other documents and nothing of seeds: training again with another seed may move a loss by "
            "more than the interval is wide."
        )
    seeds = [row["num_seeds"] for row in done if row.get("num_seeds")]
    if "seeds" in kinds:
        fewest = max(min(seeds, default=2), 2)
        factor = float(stats.t.ppf(0.975, fewest - 1))
        doubts.append(
            f"Intervals over seeds are Student t intervals. With {counted(fewest, 'seed')} the standard error is "
            f"multiplied by {factor:.1f}, and the width of the interval is itself "
            f"{'mostly' if fewest < 4 else 'partly'} chance; more seeds cure both."
        )
    if len(set(seeds)) > 1:
        doubts.append("The rows do not all rest on the same number of seeds.")
    doubts += _rate_doubts(results, rows)
    for row in _at_edge(done):
        lrs = sorted(row["lrs_tried"])
        end = "highest" if row["best_lr"] >= lrs[-1] else "lowest"
        doubts.append(
            f"{prose_name(row)} does best at the {end} learning rate tried, {learning_rate(row['best_lr'])}; "
            "a better one may lie beyond it."
        )
    if sum(bool(row.get("difference")) for row in done) > 1:
        doubts.append("Each interval stands alone; none is widened for the number of placements compared.")
    doubts += _unfinished(results, rows)
    doubts.append("One model size, one corpus and one length of training: the ranking need not hold at another scale.")
    return doubts


def _held_out(results: dict[str, Any]) -> str:
    count = results["corpus"].get("num_documents_val")
    return f", all from {counted(count, 'held-out document')}" if count else ""


def _rate_doubts(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What the choice of learning rates leaves open; rates tuned beforehand are the notes' business."""
    if results.get("rates") in ("tuned", "untuned"):
        return []
    tried: dict[str, set[tuple[str, float]]] = defaultdict(set)
    for row in rows:
        tried[row["placement"]] |= {(row["label"], lr) for lr in row.get("lrs_tried") or []}
    counts = {placement: len(settings) for placement, settings in tried.items()}
    doubts = []
    if max(counts.values(), default=0) == 1:
        grids = {lr for settings in tried.values() for _, lr in settings}
        same = ", and the same one for all" if len(grids) == 1 and len(rows) > 1 else ""
        doubts.append(
            f"Only one learning rate was tried for each placement{same}. The best rate differs from placement to "
            "placement, so this ranks them at that rate and not each at its best."
        )
    elif counts:
        doubts.append(
            "Each row shows the learning rate with the lowest validation loss, chosen on the same text that it is "
            "judged on. This flatters every row a little."
        )
    if len(set(counts.values())) > 1:
        most, fewest = max(counts.values()), min(counts.values())
        names = listing([PROSE_NAMES.get(name, name) for name, count in counts.items() if count == most])
        doubts.append(
            f"{names} had {most} settings tried, learning rates times variants, others as few as {fewest}: "
            "more tries are more chances."
        )
    return doubts


def _unfinished(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for row in rows:
        trials = trials_of(results, row)
        parts = []
        for status in ("diverged", "failed"):
            hit = sorted({trial["lr"] for trial in trials if trial["status"] == status})
            count = sum(trial["status"] == status for trial in trials)
            if count:
                at = listing([learning_rate(lr) for lr in hit])
                parts.append(f"{count} {status} (learning rate {at})")
        if parts:
            sentences.append(
                f"Of the {counted(len(trials), 'trial')} of {prose_name(row)}, {listing(parts)}"
                f"{'; none finished' if row['val_loss_mean'] is None else ''}."
            )
    return sentences


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
