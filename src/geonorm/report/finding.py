"""The sentences of the report: what the run found, and what it does not show.

Words such as "better" follow the verdicts of the summary and nothing else; docs/comparisons.md has their rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from geonorm.report.format import (
    PROSE_NAMES,
    counted,
    learning_rate,
    listing,
    loss_digits,
    number,
    percent,
    prose_name,
    rows_counted,
)
from geonorm.report.results import Results, Row


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


def describe(results: Results) -> Finding:
    """Write the finding of a run from its results."""
    rows, done = results.summary, results.finished
    doubts = _doubts(results)
    if not done:
        headline = "No trial finished, so there is nothing to compare"
        return Finding(headline, ["The table of all trials says why each one ended."], doubts)
    losses = _losses(done, rows)
    if len(done) == 1:
        name = prose_name(done[0], rows)
        unfinished = [prose_name(row, rows) for row in rows if row not in done]
        others = [f"No trial of {listing(unfinished)} finished."] if unfinished else []
        headline = f"Only {name} finished" if unfinished else f"The loss of {name}"
        return Finding(f"{headline}; there is nothing to compare it with", losses + others, doubts)
    judged = [row for row in done if row.verdict]
    if not judged:
        headline = f"Test losses of {rows_counted(done)}, without a verdict"
        return Finding(headline, losses + _without_verdict(results), doubts)
    sentences = [_judged(row, results) for row in judged] + _without_verdict(results)
    return Finding(_headline(judged, results), sentences, doubts)


def _headline(judged: list[Row], results: Results) -> str:
    rows, reference = results.summary, results.reference_row
    other = prose_name(reference, rows) if reference else ""
    better, worse = (
        [prose_name(row, rows) for row in judged if row.verdict == verdict] for verdict in ("better", "worse")
    )
    tail = f"; {listing(worse)} {_are(worse)} worse" if worse else ""
    if better:
        return f"{listing(better)} {_are(better)} better than {other} here{tail}"
    if worse:
        return f"No placement is shown to be better than {other} here{tail}"
    return f"No difference to {other} is shown here"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _losses(done: list[Row], rows: Sequence[Row]) -> list[str]:
    digits = loss_digits(rows)
    said = [f"{prose_name(row)} {number(row.test_loss_mean, digits)}" for row in done]
    return [f"Nats per token of the test text: {listing(said)}."]


def _judged(row: Row, results: Results) -> str:
    reference, difference, digits = results.reference_row, row.difference, loss_digits(results.summary)
    # parse_results lets no verdict pass without them.
    assert reference is not None
    assert difference is not None
    assert difference.ci_corrected is not None
    side = "below" if difference.mean < 0 else "above"
    low, high = (_minus(f"{bound:+.{digits}f}") for bound in difference.ci_corrected)
    words = {
        "better": "so it is better here",
        "worse": "so it is worse here",
        "no difference shown": "so no difference is shown",
    }
    return (
        f"{prose_name(row)} ends {number(abs(difference.mean), digits)} nats {side} {prose_name(reference)}; the "
        f"interval of the difference, over {difference.kind} and as wide as Holm's rule for all rows asks, is {low} to "
        f"{high}, "
        f"{words.get(row.verdict or '', row.verdict)}."
    )


def _without_verdict(results: Results) -> list[str]:
    """Why rows have none, those of one reason together."""
    done = results.finished
    if results.reference is None:
        return ["No verdict: the comparison has no Pre-Norm that finished, to which differences are taken."]
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in done:
        if row.verdict is None and row.label != results.reference:
            reasons[row.no_verdict or "it shares no seed with the reference"].append(prose_name(row, results.summary))
    everyone = len(reasons) == 1 and not any(row.verdict for row in done)
    sentences = [
        f"No verdict{'' if everyone else f' on {listing(names)}'}: {reason}." for reason, names in reasons.items()
    ]
    if any(row.num_seeds < 2 for row in done):
        sentences.append("One trained model a row tells nothing of another seed: seeds decide.")
    return sentences


def rate_sentences(results: Results) -> list[str]:
    """How the learning rates came about: the grid of each row is in the table of rates."""
    rates = results.rates
    if rates.source == "given":
        return ["All placements were given the same learning rate, though the best rate differs from one to another."]
    if rates.source == "untuned":
        return [
            "The preset's learning rates were not tuned for each placement with this model, training and text, so the "
            "losses rank nothing."
        ]
    if rates.source == "tuned":
        return [f"Each placement runs at a learning rate of its own, found beforehand. {rates.found}"]
    reporting = listing([str(seed) for seed in rates.reporting_seeds]) if rates.reporting_seeds else "none"
    refined = (
        "the given grid was followed by the neighbours of each best, a factor of sqrt(2) away"
        if rates.refined
        else "the given grid was not refined"
    )
    return [
        f"Seed {rates.selection_seed} chose each placement's learning rate by the validation text; {refined}. It is "
        f"not in the losses shown, unless it is the only one; seeds that report, on the test text: {reporting}."
    ]


def _doubts(results: Results) -> list[str]:
    rows, done = results.summary, results.finished
    doubts = rate_sentences(results)
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
    if len(steps := sorted({trial.step for trial in results.trials if trial.step})) > 1:
        doubts.append(
            f"The trials did not all run the same implementation of the step ({listing(steps)}). They differ by "
            "rounding, which training makes larger, so these trials do not repeat bit for bit."
        )
    doubts += _text_doubts(results)
    tried = Counter(placement for placement, _ in {(row.placement, row.label) for row in rows})
    if len(set(tried.values())) > 1:
        most = max(tried.values())
        names = listing([PROSE_NAMES.get(name, name) for name, count in tried.items() if count == most])
        doubts.append(
            f"{names} had {most} variants tried, others as few as {min(tried.values())}: more tries, more chances."
        )
    if sum(bool(row.difference) for row in done) > 1:
        doubts.append(
            "Verdicts compare each row with the reference, not rows with one another; the intervals of the differences "
            "are widened by Holm's rule, so that with 95% no verdict is given where there is no difference."
        )
    doubts += _unfinished(results)
    doubts.append("One model size, one corpus and one length of training: the ranking need not hold at another scale.")
    return doubts


def _text_doubts(results: Results) -> list[str]:
    corpus, doubts = results.corpus, []
    overlap, ngram = corpus.get("overlap_test"), corpus.get("overlap_ngram")
    if isinstance(overlap, float) and overlap >= 0.01:
        doubts.append(
            f"{percent(overlap)} of the test tokens lie in a run of {ngram} tokens that is in the training text too."
        )
    share = corpus.get("largest_share_test")
    if isinstance(share, float) and share > 0.5:
        doubts.append(f"One document makes {percent(share)} of the test text.")
    return doubts


def _unfinished(results: Results) -> list[str]:
    sentences = []
    for row in results.summary:
        trials = results.trials_of(row)
        parts = []
        for status in sorted({trial.status for trial in trials} - {"ok"}):
            hit = sorted({trial.lr for trial in trials if trial.status == status})
            count = sum(trial.status == status for trial in trials)
            parts.append(f"{count} {status} (learning rate {listing([learning_rate(lr) for lr in hit])})")
        if parts:
            sentences.append(
                f"Of the {counted(len(trials), 'trial')} of {prose_name(row)}, {listing(parts)}"
                f"{'; none finished' if row.test_loss_mean is None else ''}."
            )
    return sentences


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
