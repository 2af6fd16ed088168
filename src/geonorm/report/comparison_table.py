"""A comparison as tables: their cells, and the form that the terminal shows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from geonorm.report.finding import describe
from geonorm.report.format import (
    MISSING,
    counted,
    grouped,
    interval,
    learning_rate,
    loss_digits,
    number,
    options_text,
    signed,
)
from geonorm.report.results import Results, Row, Trial

# What every column needs without breaking a number.
_NARROWEST = 70
VERDICT_WORDS = {"no difference shown": "not shown", None: "no verdict"}


@dataclass(frozen=True)
class Cells:
    """One row of the comparison, written out; ``row`` keeps the numbers. The difference's interval is corrected."""

    row: Row
    options: str
    lr: str
    loss: str
    loss_interval: str
    bits: str
    difference: str
    difference_interval: str
    verdict: str
    is_reference: bool
    speed: str
    seeds: str
    notes: list[str]


def summary_cells(results: Results) -> list[Cells]:
    """The written-out rows of one variant, in the order of its summary."""
    digits = loss_digits(results.summary)
    return [_cells(row, results, digits) for row in results.summary]


def median_of(trials: Iterable[Trial], key: str) -> float | None:
    """The median of a measured quantity over trials, leaving out those that lack it."""
    values = [value for value in (getattr(trial, key) for trial in trials) if value is not None]
    return statistics.median(values) if values else None


def interval_kinds(results: Results) -> str:
    """What the intervals are over, such as ``"seeds and documents"``."""
    kinds = {row.ci_kind for row in results.summary if row.test_loss_ci}
    kinds |= {row.difference.kind for row in results.summary if row.difference and row.difference.ci}
    return " or ".join(sorted(kinds))


def print_summary(results: Results, console: Console) -> None:
    """Show a comparison on the terminal: a table a variant, the finding, and what there is to know about the run."""
    for variant in results.variants:
        if variant.name:
            console.print(variant.name, style="bold", markup=False, highlight=False)
        console.print(SummaryTable(results.of_variant(variant)))
    finding = describe(results)
    # Names and paths are the user's: no markup in them, and no line break that a copy would keep.
    console.print(f"{finding.headline}.", style="bold", markup=False, highlight=False, soft_wrap=True)
    for line in (*finding.sentences, *finding.notes):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


class SummaryTable:
    """The rows of one variant for the terminal: columns where they fit, else the names and all else line by line."""

    def __init__(self, results: Results) -> None:
        self.cells = summary_cells(results)
        kinds, reference = interval_kinds(results), results.reference
        several = sum(bool(row.difference) for row in results.summary)
        versus = f"; difference to {reference}" if reference is not None else ""
        wide = f", widened for {several} rows" if versus and several > 1 else ""
        over = f" over {kinds}" if kinds else ""
        self.caption = Text(f"nats per token of the test text, lower is better{versus}{wide}; 95% intervals{over}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table that fits the width."""
        in_columns = options.max_width >= _NARROWEST
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=self.caption)
        table.show_lines = not in_columns
        table.add_column("placement", min_width=8, overflow="fold")
        if not in_columns:
            table.add_column("test loss, difference", overflow="fold")
        # Intervals stand under their values, so that the table fits 80 columns and no number is ever broken.
        for heading in ("lr", "test loss\n95% interval", "bits/byte", "difference\n95% interval", "seeds"):
            if in_columns:
                table.add_column(heading, justify="right", no_wrap=True)
        for one in self.cells:
            # Text, not str: rich reads square brackets in a string as markup.
            name = _stacked(one.row.placement, one.options, *one.notes)
            loss = _stacked(one.loss, one.loss_interval)
            difference = _stacked(one.difference, one.difference_interval, one.verdict)
            if one.is_reference:
                difference = Text("reference")
            if in_columns:
                table.add_row(name, Text(one.lr), loss, Text(one.bits), difference, Text(one.seeds))
            else:
                table.add_row(name, Text("\n").join([loss, difference, Text(f"lr {one.lr}, seeds {one.seeds}")]))
        yield table


def _stacked(first: str, *others: str) -> Text:
    text = Text(first, style="bold")
    for line in others:
        text.append(f"\n{line}" if line not in ("", MISSING) else "", style="not bold dim")
    return text


def _cells(row: Row, results: Results, digits: int) -> Cells:
    difference = row.difference
    return Cells(
        row=row,
        options=options_text(row.options),
        lr=learning_rate(row.best_lr),
        loss=number(row.test_loss_mean, digits),
        loss_interval=interval(row.test_loss_ci, digits),
        bits=number(row.test_bits_per_byte_mean, digits),
        difference=signed(difference.mean if difference else None, digits),
        difference_interval=interval(difference.ci_corrected if difference else None, digits, sign=True),
        verdict=VERDICT_WORDS.get(row.verdict, str(row.verdict)) if difference else "",
        is_reference=row.label == results.reference,
        speed=grouped(median_of(results.shown_trials(row), "tokens_per_second")),
        seeds=str(row.num_seeds),
        notes=_notes(row, results.trials_of(row)),
    )


def _notes(row: Row, trials: list[Trial]) -> list[str]:
    finished = row.test_loss_mean is not None
    notes = [] if finished else ["no finished trial"]
    if finished and not row.num_seeds:
        notes.append("the choosing seed's loss")
    if finished and row.num_lost:
        notes.append(f"mean of the {counted(row.num_seeds, 'seed')} that finished, {row.num_lost} lost")
    ends = Counter(trial.status for trial in trials if trial.status != "ok")
    return notes + [f"{count} of {counted(len(trials), 'trial')} {status}" for status, count in sorted(ends.items())]
