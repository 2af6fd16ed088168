"""The comparison as a table: its cells, and the form that the terminal shows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

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
VERDICT_WORDS = {"better": "better", "worse": "worse", "no difference shown": "not shown", None: "no verdict"}


@dataclass(frozen=True)
class Cells:
    """One row of the comparison, written out; ``row`` keeps the numbers. The difference's interval is corrected."""

    row: Row
    placement: str
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
    """The written-out rows of the comparison, lowest test loss first."""
    digits = loss_digits(results.summary)
    return [_cells(row, results, digits) for row in results.summary]


def median_of(trials: Iterable[Trial], key: str) -> float | None:
    """The median of a measured quantity over trials, leaving out those that lack it."""
    values = [value for value in (getattr(trial, key) for trial in trials) if value is not None]
    return statistics.median(values) if values else None


def interval_kinds(rows: Iterable[Row]) -> list[str]:
    """What the intervals are over, such as ``"seeds and documents"``."""
    rows = list(rows)
    kinds = {row.ci_kind for row in rows if row.test_loss_ci}
    return sorted(kinds | {row.difference.kind for row in rows if row.difference and row.difference.ci})


def summary_table(results: Results) -> SummaryTable:
    """The comparison as a table for the terminal, lowest test loss first; print it with `rich.print`."""
    return SummaryTable(results)


class SummaryTable:
    """Columns where they fit, else two: the names, and what belongs to each line by line."""

    def __init__(self, results: Results) -> None:
        self.cells = summary_cells(results)
        kinds = interval_kinds(results.summary)
        over = f" over {' or '.join(kinds)}" if kinds else ""
        versus = ""
        if results.reference is not None:
            several = sum(bool(row.difference) for row in results.summary)
            wide = f", widened for {several} rows" if several > 1 else ""
            versus = f"; difference to {results.reference}{wide}"
        self.caption = Text(f"nats per token of the test text, lower is better{versus}; 95% intervals{over}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table that fits the width."""
        yield self._columns() if options.max_width >= _NARROWEST else self._lines()

    def _columns(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=self.caption)
        table.add_column("placement", min_width=8, overflow="fold")
        # Intervals stand under their values, so that the table fits 80 columns and no number is ever broken.
        for heading in ("lr", "test loss\n95% interval", "bits/byte", "difference\n95% interval", "seeds"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in self.cells:
            # Text, not str: rich reads square brackets in a string as markup.
            loss = _stacked(entry.loss, entry.loss_interval)
            table.add_row(_name(entry), Text(entry.lr), loss, Text(entry.bits), _difference(entry), Text(entry.seeds))
        return table

    def _lines(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_lines=True, caption=self.caption)
        table.add_column("placement", overflow="fold")
        table.add_column("test loss, difference", overflow="fold")
        for entry in self.cells:
            facts = Text("\n").join(
                [
                    _stacked(entry.loss, entry.loss_interval),
                    _difference(entry),
                    Text(f"lr {entry.lr}, seeds {entry.seeds}"),
                ]
            )
            table.add_row(_name(entry), facts)
        return table


def _name(entry: Cells) -> Text:
    return _stacked(entry.placement, entry.options, *entry.notes)


def _difference(entry: Cells) -> Text:
    if entry.is_reference:
        return Text("reference")
    return _stacked(entry.difference, entry.difference_interval, entry.verdict)


def _stacked(first: str, *others: str) -> Text:
    text = Text(first, style="bold")
    for line in others:
        text.append(f"\n{line}" if line not in ("", MISSING) else "", style="not bold dim")
    return text


def _cells(row: Row, results: Results, digits: int) -> Cells:
    difference = row.difference
    finished = row.test_loss_mean is not None
    return Cells(
        row=row,
        placement=row.placement,
        options=options_text(row.options),
        lr=learning_rate(row.best_lr),
        loss=number(row.test_loss_mean, digits),
        loss_interval=interval(row.test_loss_ci, digits),
        bits=number(row.test_bits_per_byte_mean, digits),
        difference=signed(difference.mean if difference else None, digits),
        difference_interval=interval(difference.ci_corrected if difference else None, digits, sign=True),
        verdict=VERDICT_WORDS.get(row.verdict, row.verdict or "") if difference else "",
        is_reference=finished and row.label == results.reference,
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
