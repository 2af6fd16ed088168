"""The tables of a comparison, and what the terminal says of it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console

from geonorm.report.finding import describe
from geonorm.report.format import (
    counted,
    duration,
    grouped,
    interval,
    learning_rate,
    loss_digits,
    number,
    options_text,
    scaled,
    signed,
)
from geonorm.report.results import Results, Row, Trial
from geonorm.report.series import Series, top_of_pack
from geonorm.report.tables import Cell, Strip, Table, say

VERDICT_WORDS = {"no difference shown": "not shown", None: "no verdict"}
ENDS = ("\N{LEFTWARDS ARROW} lower loss", "higher \N{RIGHTWARDS ARROW}")


def print_summary(results: Results, console: Console) -> None:
    """Show a comparison on the terminal: a table a variant, the finding, and how the results came about."""
    for variant in results.variants:
        console.print(ranking_table(results.of_variant(variant)))
    finding = describe(results)
    say(console, f"{finding.headline}.", "bold")
    for line in (*finding.sentences, *finding.notes):
        say(console, line, "dim")


def ranking_table(results: Results, series: Sequence[Series] = ()) -> Table:
    """The rows of one variant, lowest test loss first.

    Args:
        results: those of one variant.
        series: its rows as they are drawn, for the page: it has colours, small plots and speeds besides.
    """
    digits, reference = loss_digits(results.summary), results.reference
    several = sum(bool(row.difference) for row in results.summary)
    versus = f"; difference to {reference}" if reference else ""
    wide = f", widened for {several} rows" if several > 1 else ""
    kinds = interval_kinds(results)
    over = f"; 95% intervals over {kinds}" if kinds else ""
    rows = []
    for row in results.summary:
        loss = Cell(number(row.test_loss_mean, digits), _interval(row.test_loss_ci, digits), strong=True)
        bits = number(row.test_bits_per_byte_mean, digits)
        rows.append(
            [_name(row, results), learning_rate(row.best_lr), loss, bits, difference_cell(row, reference, digits)]
        )
    short = reference if reference and len(reference) < 12 else "reference"
    headings: list[str | tuple[str, str]] = ["Placement", "lr", "Test loss", "Bits/byte"]
    headings.append(f"Against {short}" if reference else "Difference")
    if series:
        strips = _strips(results)
        if any(strips):
            headings.append(ENDS)
        headings.append("Tokens/s")
        for cells, one, strip in zip(rows, series, strips, strict=True):
            cells[0] = _name(one.row, results, one.look.colour)
            cells += [Cell(colour=one.look.colour, strip=strip)] if any(strips) else []
            cells.append(grouped(median_of(one.trials, "tokens_per_second")))
    for cells, row in zip(rows, results.summary, strict=True):
        cells.append(str(row.num_seeds))
    return Table(
        [*headings, "Seeds"],
        rows,
        kind="ranking",
        title=results.variants[0].name,
        caption=f"nats per token of the test text, lower is better{versus}{wide}{over}",
    )


def overview_table(views: Sequence[Results]) -> Table:
    """All variants in one table, in each the placements as its summary ranks them."""
    rows = []
    for view in views:
        digits = loss_digits(view.summary)
        for place, row in enumerate(view.summary):
            name = Cell(row.placement, [options_text(row.options)] if row.options else [])
            loss = number(row.test_loss_mean, digits)
            variant = view.variants[0].name if place == 0 else ""
            rows.append([variant, name, learning_rate(row.best_lr), loss, difference_cell(row, view.reference, digits)])
    return Table(("Variant", "Placement", "lr", "Test loss", "Difference"), rows, left=(0, 1))


def difference_cell(row: Row, reference: str | None, digits: int) -> Cell:
    """The difference to the reference with its corrected interval and the verdict."""
    if row.label == reference:
        return Cell("reference", quiet=True)
    if row.difference is None:
        return Cell(signed(None, digits))
    bounds = _interval(row.difference.ci_corrected, digits, sign=True)
    verdict = VERDICT_WORDS.get(row.verdict, str(row.verdict))
    return Cell(signed(row.difference.mean, digits), bounds, [verdict], strong=True)


def rates_table(series: Sequence[Series]) -> Table:
    """Which learning rates were tried."""
    rows = [
        [
            Cell(one.short, colour=one.look.colour),
            learning_rate(one.row.best_lr),
            ", ".join(map(learning_rate, one.row.lrs_tried)),
            "yes" if one.row.tuned else "no",
        ]
        for one in series
    ]
    return Table(("Placement", "Rate", "Tried", "Searched to \N{SQUARE ROOT}2"), rows)


def speed_table(series: Sequence[Series]) -> Table:
    """Medians over the trials that the rows show; without rows where nothing was measured."""
    rows = []
    for one in series:
        tokens, memory = (median_of(one.trials, key) for key in ("tokens_per_second", "peak_memory_bytes"))
        if tokens is not None or memory is not None:
            rows.append([Cell(one.short, colour=one.look.colour), grouped(tokens), scaled(memory, "B")])
    return Table(("Placement", "Tokens/s", "Peak memory"), rows)


def trials_table(results: Results) -> Table:
    """Every trial, in the order of placements that was planned, then by learning rate and seed."""
    digits = loss_digits(results.summary)
    # A refined rate was planned after the others and stands between them.
    order = {key: place for place, key in enumerate(dict.fromkeys((t.variant, t.label) for t in results.trials))}
    rows = []
    for trial in sorted(results.trials, key=lambda t: (order[t.variant, t.label], t.lr, t.seed)):
        numbers = [
            learning_rate(trial.lr),
            str(trial.seed),
            *(number(loss, digits) for loss in (trial.test_loss, trial.val_loss, trial.train_loss)),
            scaled(trial.tokens),
            duration(trial.seconds),
        ]
        under = [text for text in (options_text(trial.options), trial.variant) if text]
        status = Cell(trial.status, [trial.message] if trial.message else [])
        rows.append(
            [Cell(trial.placement, under), *(Cell(text, quiet=trial.status != "ok") for text in numbers), status]
        )
    headings = ("Placement", "lr", "Seed", "Test loss", "Val loss", "Train loss", "Tokens", "Time", "Status")
    return Table(headings, rows, left=(0, 8), kind="trials")


def median_of(trials: Iterable[Trial], key: str) -> float | None:
    """The median of a measured quantity over trials, leaving out those that lack it."""
    values = [value for value in (getattr(trial, key) for trial in trials) if value is not None]
    return statistics.median(values) if values else None


def interval_kinds(results: Results) -> str:
    """What the intervals are over, such as ``"seeds and documents"``."""
    kinds = {row.ci_kind for row in results.summary if row.test_loss_ci}
    kinds |= {row.difference.kind for row in results.summary if row.difference and row.difference.ci}
    return " or ".join(sorted(kinds))


def _interval(bounds: tuple[float, float] | None, digits: int, *, sign: bool = False) -> list[str]:
    return [interval(bounds, digits, sign=sign)] if bounds else []


def _name(row: Row, results: Results, colour: str = "") -> Cell:
    """The name of a row with its options, and what there is to remark on its trials."""
    trials, finished = results.trials_of(row), row.test_loss_mean is not None
    remarks = [] if finished else ["no finished trial"]
    if finished and not row.num_seeds:
        remarks.append("the choosing seed's loss")
    if finished and row.num_lost:
        remarks.append(f"mean of the {counted(row.num_seeds, 'seed')} that finished, {row.num_lost} lost")
    ends = Counter(trial.status for trial in trials if trial.status != "ok")
    remarks += [f"{count} of {counted(len(trials), 'trial')} {status}" for status, count in sorted(ends.items())]
    return Cell(row.placement, [options_text(row.options)] if row.options else [], remarks, colour, strong=True)


def _strips(results: Results) -> list[Strip | None]:
    """Small plots on one scale: of differences where there are any, else of losses; none for fewer than two rows."""
    rows, digits = results.summary, loss_digits(results.summary)
    by_difference = any(row.difference for row in rows)
    values: list[tuple[float | None, tuple[float, float] | None]] = [
        (row.test_loss_mean, row.test_loss_ci) for row in rows
    ]
    if by_difference:
        own = [(row.difference.mean, row.difference.ci_corrected) if row.difference else (None, None) for row in rows]
        values = [(0.0, None) if row is results.reference_row else one for row, one in zip(rows, own, strict=True)]
    means = sorted(mean for mean, _ in values if mean is not None)
    if len(means) < 2:
        return [None] * len(rows)
    # One collapsed row would press all others into a line: it gets an arrow at the edge instead.
    top = top_of_pack(means)
    bounds = [bound for mean, ends in values if mean is not None and mean <= top for bound in ends or (mean,)]
    # Two seeds can give an interval a hundred times as wide as the spread of the rows.
    span = max(top - means[0], 1e-4)
    low, high = max(min(*bounds, means[0]), means[0] - 2 * span), min(max(*bounds, top), top + 2 * span)
    # Rows can be equal to the bit, as a placement and the same one spelt otherwise are.
    pad = 0.04 * max(high - low, span)
    low, high = low - pad, high + pad

    def at(value: float) -> float:
        return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)

    strips: list[Strip | None] = []
    for row, (mean, ends) in zip(rows, values, strict=True):
        said = Cell(f"loss {number(mean, digits)}", _interval(ends, digits))
        if by_difference:
            said = difference_cell(row, results.reference, digits)
        label = f"{row.placement}: {'difference ' if row.difference else ''}{' '.join([said.text, *said.under])}"
        line = at(0.0) if by_difference and low <= 0 <= high else None
        shown = (at(ends[0]), at(ends[1])) if ends else None
        strips.append(None if mean is None else Strip(label, at(mean), shown, line, beyond=mean > high))
    return strips
