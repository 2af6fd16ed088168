"""The comparison as a table: its cells, and the form that the terminal shows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich import box
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
from geonorm.report.load import best_trials, check_results, ranked, trials_of


@dataclass(frozen=True)
class Cells:
    """One row of the comparison, written out; ``row`` keeps the numbers."""

    row: dict[str, Any]
    placement: str
    options: str
    lr: str
    loss: str
    loss_interval: str
    bits: str
    difference: str
    difference_interval: str
    is_reference: bool
    speed: str
    seeds: str
    notes: list[str]


def summary_cells(results: dict[str, Any]) -> list[Cells]:
    """The written-out rows of the comparison, best first.

    Args:
        results: the content of ``results.json``.
    """
    rows = ranked(results)
    digits = loss_digits(rows)
    reference = reference_row(rows)
    return [_cells(row, trials_of(results, row), digits, row is reference) for row in rows]


def reference_row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that the differences are taken to: named by them, else stock Pre-Norm where it is there."""
    names = [row["difference"]["reference"] for row in rows if row.get("difference")]
    for key in ("label", "placement"):
        for row in rows:
            if row[key] == (names[0] if names else "pre"):
                return row
    return None


def median_of(trials: list[dict[str, Any]], key: str) -> float | None:
    """The median of a measured quantity over trials, leaving out those that lack it."""
    values = [trial[key] for trial in trials if trial.get(key) is not None]
    return statistics.median(values) if values else None


def interval_kinds(rows: list[dict[str, Any]]) -> set[str]:
    """Where the intervals come from: ``"seeds"``, ``"windows"``, both, or neither."""
    kinds = {row["ci_kind"] for row in rows if row.get("val_loss_ci") and row.get("ci_kind")}
    for row in rows:
        difference = row.get("difference")
        if difference and difference.get("ci"):
            kinds.add(difference["kind"].removeprefix("paired "))
    return kinds


def summary_table(results: dict[str, Any]) -> Table:
    """The comparison as a table for the terminal, best first.

    Args:
        results: the content of ``results.json``.

    Returns:
        a rich table; print it with `rich.print`.

    Raises:
        UserError: ``results`` lacks a part.
    """
    check_results(results)
    cells = summary_cells(results)
    rows = [entry.row for entry in cells]
    reference = reference_row(rows)
    kinds = interval_kinds(rows)
    source = f" over {' and '.join(sorted(kinds))}" if kinds else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("placement", min_width=8, overflow="fold")
    # Intervals stand under their values, so that the table fits 80 columns and no number is ever broken.
    headings = ("lr", "val loss\n95% interval", "bits/byte", "difference\n95% interval", "seeds")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in cells:
        placement = Text(entry.placement, style="bold")
        for line in (entry.options, *entry.notes):
            placement.append(f"\n{line}" if line else "", style="not bold dim")
        difference = Text("reference" if entry.is_reference else entry.difference)
        # Text, not str: rich reads square brackets in a string as markup.
        loss = Text(entry.loss, style="bold")
        for cell, bounds in ((loss, entry.loss_interval), (difference, entry.difference_interval)):
            cell.append(f"\n{bounds}" if bounds != MISSING else "", style="not bold dim")
        values = (entry.lr, loss, entry.bits, difference, entry.seeds)
        table.add_row(placement, *(Text(cell) if isinstance(cell, str) else cell for cell in values))
    versus = f"; difference to {reference['label']}" if reference else ""
    table.caption = Text(f"nats per token, lower is better{versus}; 95% intervals{source}")
    return table


def _cells(row: dict[str, Any], trials: list[dict[str, Any]], digits: int, is_reference: bool) -> Cells:
    difference = row.get("difference") or {}
    finished = row["val_loss_mean"] is not None
    return Cells(
        row=row,
        placement=row["placement"],
        options=options_text(row["options"]),
        lr=learning_rate(row.get("best_lr")) if finished else MISSING,
        loss=number(row["val_loss_mean"], digits),
        loss_interval=interval(row.get("val_loss_ci"), digits),
        bits=number(row.get("val_bits_per_byte_mean"), digits),
        difference=signed(difference.get("mean"), digits),
        difference_interval=interval(difference.get("ci"), digits, sign=True),
        is_reference=is_reference and finished,
        speed=grouped(median_of(best_trials(row, trials), "tokens_per_second")),
        seeds=str(row.get("num_seeds") or 0),
        notes=_notes(row, trials, finished),
    )


def _notes(row: dict[str, Any], trials: list[dict[str, Any]], finished: bool) -> list[str]:
    diverged = row.get("num_diverged") or sum(trial["status"] == "diverged" for trial in trials)
    failed = sum(trial["status"] == "failed" for trial in trials)
    notes = [] if finished else ["no finished trial"]
    if finished and row.get("lr_at_edge") and len(row.get("lrs_tried") or []) > 1:
        notes.append("lr at edge of grid")
    if finished and row.get("num_lost"):
        notes.append(f"mean of the {counted(row['num_seeds'], 'seed')} that finished, {row['num_lost']} lost")
    if diverged:
        notes.append(f"{diverged} of {counted(len(trials), 'trial')} diverged" if trials else f"{diverged} diverged")
    if failed:
        notes.append(f"{failed} of {counted(len(trials), 'trial')} failed")
    return notes
