"""An inspection as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from geonorm.report.format import MISSING
from geonorm.report.inspection.words import PART_NAMES, SERIES_NAMES, degrees, size, token_words


def inspection_tables(results: dict[str, Any]) -> list[Group]:
    """Two tables a model, each with a note: its sub-layers, and the laws of decay fitted to its angles.

    Args:
        results: the content of ``inspection.json``.
    """
    return [table for model in results["models"] for table in (_sublayers(model), _laws(model))]


def _sublayers(model: dict[str, Any]) -> Group:
    gradients = model["gradient_norms"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, title_justify="left")
    table.title = Text(f"{model['name']} ({model['class']}, {model['placement_label']})", style="bold")
    headings = ["layer", "sub-layer", "radius", "update", "along", "across", "angle", "25% 75%", "alpha"]
    if gradients:
        headings.append("grad")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "sub-layer" else "right", no_wrap=True)
    for row in model["sublayers"]:
        begins = row["sublayer"] == "attention"
        cells = [
            str(row["layer"]) if begins else "",
            SERIES_NAMES[row["sublayer"]],
            *(size(row[name]["median"]) for name in ("radius", "update", "along", "across")),
            degrees(row["angle"]["median"]),
            f"{degrees(row['angle']['q25'])} {degrees(row['angle']['q75'])}",
            size(row["alpha"]["median"]),
        ]
        if gradients:
            cells.append(size(gradients[row["layer"] - 1]) if begins else "")
        table.add_row(*map(Text, cells))
    loss = "" if model["loss"] is None else f"; loss {model['loss']:.3f} nats/token"
    skipped = model["tokens"]["skip_first"]
    note = (
        f"medians over {model['tokens']['counted']} tokens; lengths are RMS, angles in degrees; alpha: step size that "
        f"geonorm needs for the same angle; {token_words(model)}; the first {skipped} of each left out{loss}"
    )
    return Group(table, Text(note, style="dim"))


def _laws(model: dict[str, Any]) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("law of", "blocks", "none", "1/k", "1/sqrt(k)", "linear", "power", "exponent")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right", no_wrap=True)
    for row in law_rows(model):
        errors = [Text(error, style="bold" if best else "") for error, best in row["errors"]]
        table.add_row(Text(row["series"]), Text(row["key"]), *errors, Text(row["exponent"]))
    note = (
        "typical error of each fitted law on a layer left out of its fit, bold is best; k: layer; power: k^-exponent; "
        "inner: without the first and the last block"
    )
    return Group(table, Text(note, style="dim"))


def law_rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    """The laws of one model, written out: ``series``, ``part``, its ``key``, ``errors`` (text, best?), ``exponent``."""
    rows = []
    fitted = [(f"angle, {SERIES_NAMES[series]}", parts) for series, parts in model["laws"].items()]
    # Step sizes of the two differ by less than their angles: it is the radius of the stream that sets them.
    fitted.append((f"alpha, {SERIES_NAMES['both']}", model["alpha_laws"]["both"]))
    for series, parts in fitted:
        for part, fits in parts.items():
            rows.append(
                {
                    "series": series,
                    "part": PART_NAMES[part],
                    "key": part,
                    "errors": [(_percent(fit["held_out"]), fit["law"] == fits["best"]) for fit in fits["fits"]]
                    or [(MISSING, False)] * 5,
                    "exponent": _exponent(fits),
                }
            )
    return rows


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def _exponent(fits: dict[str, Any]) -> str:
    for fit in fits["fits"]:
        if fit["exponent"] is not None:
            # Adding zero turns the minus zero that rounding may leave into zero.
            return f"{round(fit['exponent'], 2) + 0.0:.2f} ± {fit['exponent_error']:.2f}"
    return MISSING
