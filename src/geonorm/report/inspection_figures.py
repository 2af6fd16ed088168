"""The figures of an inspection: quantities by layer, medians with their quartiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from geonorm.inspection import LawFit
from geonorm.report.inspection_finding import SERIES_NAMES, best_fit, law_words
from geonorm.report.page import Section
from geonorm.report.plots import Line, Panel, depth_panel
from geonorm.report.series import Curve
from geonorm.report.style import look

SUBLAYERS = ("attention", "mlp")
ANGLE = (
    "Angle by which one sub-layer turns the residual stream: median over tokens, band from the lower to the upper "
    "quartile."
)
LENGTHS = (
    "Length of the stream before each sub-layer, and of what the sub-layer gives to it, both divided by the square "
    "root of the hidden size. Where the first grows as fast as the second, the angle stays."
)
ALONG = (
    "The update taken apart: along the stream it changes the radius (above zero it lengthens, below it shortens), "
    "across it turns. geonorm keeps the second part alone."
)
ALPHA = (
    "Step size with which geonorm, on its sphere of RMS 1, would turn the stream by the same angle for the same "
    "sub-layer output. A model that adds to a growing stream has a decay built in: this is it."
)
GRADIENT = (
    "Norm of the gradient of each block's parameters for the mean loss on this text. A line that falls to the right "
    "means that the lower layers get the larger gradients."
)


def inspection_figures(models: list[dict[str, Any]]) -> list[Section]:
    """Draw every figure that the measurements allow; call and save them inside `style.context`.

    Args:
        models: those of ``inspection.json``.
    """
    angle, caption = _panels(models, "angle", "Angle of each step, degrees", scale=180 / math.pi), ANGLE
    if len(models) == 1:
        caption += _draw_laws(models[0], angle[0])
    radius = _panels(models, "radius", "Radius of the stream, RMS", log=True)
    update = _panels(models, "update", "Length of the update, RMS", log=True)
    along = _panels(models, "along", "Part of the update along the stream, RMS")
    across = _panels(models, "across", "Part across the stream, RMS", log=True)
    alpha = _panels(models, "alpha", "Step size that geonorm would need", log=True)
    sections = [
        Section("How far each sub-layer turns the stream", panels=angle, caption=caption),
        Section("How long the stream and its updates are", panels=radius + update, caption=LENGTHS),
        Section("Along and across", panels=along + across, caption=ALONG),
        Section("The decay that is built in", panels=alpha, caption=ALPHA),
    ]
    lines = []
    for index, model in enumerate(models):
        if model["gradient_norms"]:
            values = np.array(model["gradient_norms"], dtype=float)
            curve = Curve(np.arange(1, len(values) + 1), values, values, values)
            lines.append(Line(model["name"] if len(models) > 1 else "blocks", look(index), curve))
    if lines:
        drawn = depth_panel("gradient", "Norm of the gradient", lines, _all_of(lines), log=True)
        sections.append(Section("Gradient norm by layer", panels=[drawn], caption=GRADIENT))
    return sections


def _panels(
    models: list[dict[str, Any]], quantity: str, title: str, *, log: bool = False, scale: float = 1.0
) -> list[Panel]:
    """One panel with a line for each kind of sub-layer, or for several models one panel a kind with a line a model."""
    by_kind = {
        kind: [Line(model["name"], look(i), _curve(model, kind, quantity, scale)) for i, model in enumerate(models)]
        for kind in SUBLAYERS
    }
    values = _all_of([line for lines in by_kind.values() for line in lines])
    if len(models) > 1:
        return [
            depth_panel(f"{quantity}-{kind}", f"{title}: {SERIES_NAMES[kind]}", lines, values, log=log)
            for kind, lines in by_kind.items()
        ]
    lines = [Line(SERIES_NAMES[kind], look(i), by_kind[kind][0].curve) for i, kind in enumerate(SUBLAYERS)]
    return [depth_panel(quantity, title, lines, values, log=log)]


def _all_of(lines: list[Line]) -> np.ndarray:
    return np.concatenate([part for line in lines for part in (line.curve.y, line.curve.low, line.curve.high)])


def _draw_laws(model: dict[str, Any], panel: Panel) -> str:
    """Draw the best law of each kind of sub-layer between the first and the last block, and say which they are."""
    depth, found = model["num_layers"], []
    for index, kind in enumerate(SUBLAYERS):
        fits = model["laws"][kind]["inner"]
        if fits["best"] is not None:
            law, layers = LawFit(**best_fit(fits)), np.linspace(2, depth - 1, 200)
            angles = np.degrees([law.at(layer, depth) for layer in layers])
            dashed = {"linestyle": (0, (4, 3)), "linewidth": 0.9, "zorder": 2}
            panel.figure.axes[0].plot(layers, angles, color=look(index).colour, **dashed)
            found.append(f"{SERIES_NAMES[kind]} {law_words(fits)}")
    return f" Dashed: the best law between the first and the last block ({', '.join(found)})." if found else ""


def _curve(model: dict[str, Any], kind: str, quantity: str, scale: float) -> Curve:
    rows = [row for row in model["sublayers"] if row["sublayer"] == kind]
    low, middle, high = (
        # What no token had, such as a step size where nothing turns, is null in the file and a gap in the line.
        scale * np.array([row[quantity][key] for row in rows], dtype=float)
        for key in ("q25", "median", "q75")
    )
    return Curve(np.array([row["layer"] for row in rows]), middle, low, high)
