"""The tables of an inspection, and what the terminal says of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from geonorm.report.format import MISSING
from geonorm.report.inspection_finding import (
    SERIES_NAMES,
    degrees,
    describe_inspection,
    size,
    text_words,
    token_words,
)
from geonorm.report.tables import Cell, Table, say


def print_inspection(results: dict[str, Any], console: Console) -> None:
    """Show an inspection on the terminal: two tables a model, the finding, and what limits it.

    Args:
        results: the content of ``inspection.json``.
        console: where.
    """
    for model in results["models"]:
        console.print(sublayers_table(model), laws_table(model))
    found = describe_inspection(results)
    say(console, f"{found.headline}.", "bold")
    for line in found.sentences:
        say(console, line)
    for line in (f"text: {text_words(results)}", *found.doubts):
        say(console, line, "dim")


def sublayers_table(model: dict[str, Any], *, wide: bool = False) -> Table:
    """What every sub-layer does; wide, with the columns that a terminal has no room for."""
    gradients = model["gradient_norms"]
    headings = ["Layer", "Sub-layer", "Radius", "Update", "Along", "Across", "Angle", "Quartiles", "Alpha"]
    headings += ["Alpha, unit\N{NO-BREAK SPACE}update", "First radius", "First angle"] if wide else []
    headings += ["Grad"] if gradients else []
    rows = []
    for row in model["sublayers"]:
        begins = row["sublayer"] == "attention"
        cells: list[Cell | str] = [
            str(row["layer"]) if begins else "",
            SERIES_NAMES[row["sublayer"]],
            *(size(row[name]["median"]) for name in ("radius", "update", "along", "across")),
            Cell(degrees(row["angle"]["median"]), strong=True),
            (" to " if wide else " ").join(degrees(row["angle"][key]) for key in ("q25", "q75")),
            size(row["alpha"]["median"]),
        ]
        if wide:
            cells += [size(row["alpha_normalized"]["median"]), size(row["first_radius"]), degrees(row["first_angle"])]
        if gradients:
            cells.append(size(gradients[row["layer"] - 1]) if begins else "")
        rows.append(cells)
    loss = "" if model["loss"] is None else f"; loss {model['loss']:.3f} nats/token"
    tokens = model["tokens"]
    caption = (
        f"medians over {tokens['counted']} tokens; lengths are RMS, angles in degrees; alpha: step size that geonorm "
        f"needs for the same angle; {token_words(model)}; the first {tokens['skip_first']} of each left out{loss}"
    )
    name = f"{model['name']} ({model['class']}, {model['placement_label']})"
    return Table(headings, rows, left=(0, 1), kind="trials dense", title=name, caption=caption)


def laws_table(model: dict[str, Any]) -> Table:
    """The laws of decay that were fitted to the angles and step sizes of one model."""
    fitted = [(f"angle, {SERIES_NAMES[series]}", parts) for series, parts in model["laws"].items()]
    # Step sizes of the two differ by less than their angles: it is the radius of the stream that sets them.
    fitted.append((f"alpha, {SERIES_NAMES['both']}", model["alpha_laws"]["both"]))
    rows = []
    for series, parts in fitted:
        for part, fits in parts.items():
            errors = [_error(fit, fits["best"]) for fit in fits["fits"]] or [Cell(MISSING)] * 5
            exponent = next((fit for fit in fits["fits"] if fit["exponent"] is not None), None)
            # Adding zero turns the minus zero that rounding may leave into zero.
            words = (
                f"{round(exponent['exponent'], 2) + 0.0:.2f} ± {exponent['exponent_error']:.2f}"
                if exponent
                else MISSING
            )
            rows.append([series, part, *errors, words])
    headings = ("Law of", "Blocks", "none", "1/k", "1/sqrt(k)", "linear", "power", "exponent")
    caption = (
        "typical error of each fitted law on a layer left out of its fit, bold is best; k: layer; power: k^-exponent; "
        "inner: without the first and the last block"
    )
    return Table(headings, rows, left=(0, 1), kind="trials", title=model["name"], caption=caption)


def _error(fit: dict[str, Any], best: str) -> Cell:
    error = MISSING if fit["held_out"] is None else f"{fit['held_out']:.0%}"
    return Cell(error, strong=fit["law"] == best, quiet=fit["law"] != best)
