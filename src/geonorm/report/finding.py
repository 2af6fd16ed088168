"""The sentences of the report: what the run found, and what it does not show.

Words such as "better" follow the verdicts of the summary and nothing else; docs/comparisons.md has their rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from scipy import stats

from geonorm.report.format import (
    PROSE_NAMES,
    counted,
    learning_rate,
    listing,
    loss_digits,
    minus,
    number,
    percent,
    prose_name,
    rows_counted,
    signed,
)
from geonorm.report.results import FEWEST_DOCUMENTS, FEWEST_SEEDS, Results, Row


@dataclass(frozen=True)
class Finding:
    """What was found, in sentences.

    Attributes:
        headline: one line without a full stop.
        sentences: the paragraph under it.
        doubts: what a reader must hold against it, one sentence or two each.
        notes: what a reader has to know about how the results came about.
    """

    headline: str
    sentences: list[str]
    doubts: list[str]
    notes: list[str] = field(default_factory=list)


def describe(results: Results) -> Finding:
    """Write the finding of a comparison; of several variants each has its headline among the sentences."""
    parts = {one.name: describe_variant(results.of_variant(one)) for one in results.variants}
    headline, sentences = next(iter(parts.values()))
    if len(parts) > 1:
        headline = _headline_of_several(results)
        sentences = [f"{name}: {own}." for name, (own, _) in parts.items()]
    doubts = {one.name: _doubts(results.of_variant(one)) for one in results.variants}
    everywhere = set.intersection(*map(set, doubts.values()))
    shared = [doubt for doubt in next(iter(doubts.values())) if doubt in everywhere]
    own = [f"{name}: {doubt}" for name, said in doubts.items() for doubt in said if doubt not in everywhere]
    if len(parts) > 1:
        own.append("Each variant has a reference of its own; no interval compares the losses of two variants.")
    return Finding(headline, sentences, [*shared, *own, _scale(results)], _notes(results))


def describe_variant(results: Results) -> tuple[str, list[str]]:
    """Headline and sentences of results that hold one variant."""
    rows, done = results.summary, results.finished
    if not done:
        return "No trial finished, so there is nothing to compare", ["The table of all trials says why each one ended."]
    said = [f"{prose_name(row)} {number(row.test_loss_mean, loss_digits(rows))}" for row in done]
    losses = f"Nats per token of the test text: {listing(said)}."
    if len(done) == 1:
        name = prose_name(done[0], rows)
        unfinished = [prose_name(row, rows) for row in rows if row not in done]
        others = [f"No trial of {listing(unfinished)} finished."] if unfinished else []
        headline = f"Only {name} finished" if unfinished else f"The loss of {name}"
        return f"{headline}; there is nothing to compare it with", [losses, *others]
    judged = [row for row in done if row.verdict]
    if not judged:
        return f"Test losses of {rows_counted(done)}, without a verdict", [losses, *_without_verdict(results)]
    reference = results.reference_row
    # parse_results lets no verdict pass without one.
    assert reference is not None
    sentences = [_judged(row, reference, loss_digits(rows)) for row in judged] + _without_verdict(results)
    better, worse = ([prose_name(row, rows) for row in judged if row.verdict == one] for one in ("better", "worse"))
    other, tail = prose_name(reference, rows), f"; {_are(worse)} worse" if worse else ""
    if better:
        return f"{_are(better)} better than {other} here{tail}", sentences
    if worse:
        return f"No placement is shown to be better than {other} here{tail}", sentences
    return f"No difference to {other} is shown here", sentences


def _headline_of_several(results: Results) -> str:
    count = counted(len(results.variants), "variant")
    if not any(row.verdict for row in results.summary):
        return f"Test losses of {count}, without a verdict"
    said = {}
    for verdict in ("better", "worse"):
        views = [results.of_variant(variant).summary for variant in results.variants]
        tally = Counter(prose_name(row, rows) for rows in views for row in rows if row.verdict == verdict)
        said[verdict] = listing([f"{name} in {times}" for name, times in tally.items()]) if tally else ""
    other, tail = PROSE_NAMES["pre"], f"; worse: {said['worse']}" if said["worse"] else ""
    if said["better"]:
        return f"Better than {other} over {count}: {said['better']}{tail}"
    if tail:
        return f"No placement is shown to be better than {other} in any of {count}{tail}"
    return f"No difference to {other} is shown in any of {count}"


def _are(names: list[str]) -> str:
    return f"{listing(names)} {'is' if len(names) == 1 else 'are'}"


def _judged(row: Row, reference: Row, digits: int) -> str:
    difference = row.difference
    # parse_results lets no verdict pass without them.
    assert difference is not None
    assert difference.ci_corrected is not None
    side = "below" if difference.mean < 0 else "above"
    low, high = (minus(signed(bound, digits)) for bound in difference.ci_corrected)
    shown = "no difference is shown" if row.verdict == "no difference shown" else f"it is {row.verdict} here"
    return (
        f"{prose_name(row)} ends {number(abs(difference.mean), digits)} nats {side} {prose_name(reference)}; the "
        f"interval of the difference, over {difference.kind} and as wide as Holm's rule for all rows asks, is {low} to "
        f"{high}, so {shown}."
    )


def _without_verdict(results: Results) -> list[str]:
    """Why rows have none, those of one reason together."""
    done = results.finished
    if results.reference is None:
        return ["No verdict: the comparison has no Pre-Norm that finished, to which differences are taken."]
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in done:
        if row.verdict is None and row.label != results.reference:
            reasons[_reason(row)].append(prose_name(row, results.summary))
    everyone = len(reasons) == 1 and not any(row.verdict for row in done)
    sentences = [
        f"No verdict{'' if everyone else f' on {listing(names)}'}: {reason}." for reason, names in reasons.items()
    ]
    if any(row.num_seeds < 2 for row in done):
        sentences.append("One trained model a row tells nothing of another seed: seeds decide.")
    return sentences


def _reason(row: Row) -> str:
    """The words of ``no_verdict``, with the numbers that decide."""
    seeds = row.difference.num_seeds if row.difference else 0
    whose = [
        name for key, name in (("", "its"), ("reference ", "the reference's")) if f"{key}not tuned" in row.no_verdict
    ]
    untuned = f"{' and '.join(whose)} learning rate was not searched to a factor of sqrt(2)"
    words = {
        "not finished": "the comparison is not finished",
        "seed lost": "a seed was lost",
        "reference lost a seed": "a seed of the reference was lost",
        "few seeds": f"reporting seeds shared with the reference: {seeds}, needed: {FEWEST_SEEDS}",
        "not tuned": untuned,
        "reference not tuned": untuned,
        "few documents": f"documents in the windows of the test text: {row.num_documents}, needed: {FEWEST_DOCUMENTS}",
        "no seed shared": "it shares no seed with the reference",
    }
    return "; ".join(dict.fromkeys(words[reason] for reason in row.no_verdict)) or "no reason is on record"


def _rates(results: Results) -> str:
    """How the learning rates came about: the grid of each row is in the table of rates."""
    rates = results.rates
    if rates.source == "given":
        return "All placements were given the same learning rate, though the best rate differs from one to another."
    if rates.source == "untuned":
        return (
            "The preset's learning rates were not tuned for each placement with this model, training and text, so the "
            "losses rank nothing."
        )
    if rates.source == "tuned":
        return f"Each placement runs at a learning rate of its own, found beforehand. {rates.found}"
    refined = "followed by the neighbours of each best, a factor of sqrt(2) away" if rates.refined else "not refined"
    return (
        f"Seed {rates.selection_seed} chose each placement's learning rate by the validation text; the given grid was "
        f"{refined}. It is not in the losses shown, unless it is the only one; seeds that report, on the test text: "
        f"{listing([str(seed) for seed in rates.reporting_seeds]) if rates.reporting_seeds else 'none'}."
    )


def _doubts(results: Results) -> list[str]:
    """What limits one variant."""
    rows, done = results.summary, results.finished
    doubts = [_rates(results)]
    counts = {row.num_seeds for row in done}
    fewest = min((count for count in counts if count > 1), default=0)
    if fewest and fewest < 5:
        factor = float(stats.t.ppf(0.975, fewest - 1))
        doubts.append(
            f"With {counted(fewest, 'seed')} the standard error over seeds is multiplied by {factor:.1f}, and the "
            f"width of the interval is itself {'mostly' if fewest < 4 else 'partly'} chance; more seeds cure both."
        )
    if any(row.ci_kind == "documents" and row.test_loss_ci for row in done):
        doubts.append(
            "An interval over documents alone says how exactly one trained model was measured. It does not contain the "
            "variation from seed to seed."
        )
    if len(counts) > 1:
        doubts.append("The rows do not all rest on the same number of seeds.")
    corpus = results.corpus
    overlap, share = corpus.get("overlap_test"), corpus.get("largest_share_test")
    if isinstance(overlap, float) and overlap >= 0.01:
        doubts.append(
            f"{percent(overlap)} of the test tokens lie in a run of {corpus.get('overlap_ngram')} tokens that is in "
            "the training text too."
        )
    if isinstance(share, float) and share > 0.5:
        doubts.append(f"One document makes {percent(share)} of the test text.")
    tried = Counter(row.placement for row in rows)
    if len(set(tried.values())) > 1:
        most = max(tried.values())
        names = listing([PROSE_NAMES.get(name, name) for name, count in tried.items() if count == most])
        doubts.append(
            f"{names} had {most} sets of options tried, others as few as {min(tried.values())}: more tries, more "
            "chances."
        )
    if sum(bool(row.difference) for row in done) > 1:
        doubts.append(
            "Verdicts compare each row with the reference, not rows with one another; the intervals of the differences "
            "are widened by Holm's rule, so that with 95% no verdict is given where there is no difference."
        )
    return doubts + [sentence for row in rows if (sentence := _unfinished(row, results))]


def _unfinished(row: Row, results: Results) -> str:
    trials = results.trials_of(row)
    parts = []
    for status in sorted({trial.status for trial in trials} - {"ok"}):
        hit = [trial.lr for trial in trials if trial.status == status]
        rates = listing([learning_rate(lr) for lr in sorted(set(hit))])
        parts.append(f"{len(hit)} {status} (learning rate {rates})")
    none = "; none finished" if row.test_loss_mean is None else ""
    return f"Of the {counted(len(trials), 'trial')} of {prose_name(row)}, {listing(parts)}{none}." if parts else ""


def _scale(results: Results) -> str:
    varied = [key for variant in results.variants for key in variant.values]
    kinds = {"model size": ("model.",), "corpus": ("data.",), "length of training": ("steps", "global_batch_size")}
    one = [f"one {name}" for name, keys in kinds.items() if not any(key.startswith(keys) for key in varied)]
    if not one:
        return "The ranking need not hold beyond these sizes, texts and lengths of training."
    words = listing(one)
    return f"{words[0].upper()}{words[1:]}: the ranking need not hold at another scale."


def _notes(results: Results) -> list[str]:
    """How the results came about: rates of elsewhere, short texts, mixed code, what is missing."""
    notes = [
        f"{label} runs at the rate that was found for {label.partition('(')[0]}." for label in results.rates.inherited
    ]
    if results.rates.other_corpus:
        notes.append("The rates were found on another text than the one that is trained on here.")
    key = "evaluation.windows"
    asked = [settings.get(key) or 0 for settings in (results.settings, *(one.values for one in results.variants))]
    for side, name in (("val", "validation"), ("test", "test")):
        available = results.num_windows.get(side)
        if available is not None and available < max(asked):
            notes.append(f"The {name} text holds only {counted(available, 'window')}; all of them are used.")
    ran = [trial for trial in results.trials if trial.status != "failed"]
    if len({trial.code for trial in ran}) > 1:
        notes.append("The trials did not all run on the same version of the code.")
    steps = sorted({name for trial in ran for name in (trial.step_impl or "").split(", ") if name})
    if len(steps) > 1:
        notes.append(
            f"The trials did not all run the same implementation of the step ({listing(steps)}). They differ by "
            "rounding, which training makes larger, so these trials do not repeat bit for bit."
        )
    if not results.complete:
        count = len(results.trials)
        notes.append(
            f"The comparison is not finished: {counted(count, 'trial')} {'has' if count == 1 else 'have'} ended."
        )
    elif others := results.num_other_trials:
        are = "trial that is" if others == 1 else "trials that are"
        notes.append(f"The folder holds {others} more {are} not part of this comparison.")
    return notes
