"""The figures of an inspection: quantities by layer, medians with their quartiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from geonorm.report import style
from geonorm.report.curves import Curve
from geonorm.report.drawing import Block, Line, Panel, depth_axes, draw_lines, panel
from geonorm.report.inspection.words import SERIES_NAMES, best_fit, law_words
from geonorm.schedules import DECAYS

SUBLAYERS = ("attention", "mlp")
# A logarithmic axis pays only where the values span more than this.
_WIDE_SPAN = 8


def make_figures(results: dict[str, Any]) -> list[Block]:
    """Draw every figure that the measurements allow; call and save them inside `style.context`.

    Returns:
        blocks ``angle``, ``lengths``, ``along``, ``alpha`` and, where it was measured, ``gradient``.
    """
    models = results["models"]
    blocks = [_angle(models), _lengths(models), _along(models), _alpha(models), _gradient(models)]
    return [block for block in blocks if block is not None]


def _angle(models: list[dict[str, Any]]) -> Block:
    panels = _panels(
        models, "angle", "Angle of each step, degrees", "angle", scale=180 / math.pi, laws=len(models) == 1
    )
    caption = (
        "Angle by which one sub-layer turns the residual stream: median over tokens, band from the lower to the upper "
        "quartile."
    )
    if len(models) == 1:
        fits = {name: models[0]["laws"][name]["inner"] for name in SUBLAYERS}
        found = [f"{SERIES_NAMES[name]} {law_words(one)}" for name, one in fits.items() if one["best"]]
        if found:
            caption += f" Dashed: the best law between the first and the last block ({', '.join(found)})."
    return Block("angle", panels, caption)


def _lengths(models: list[dict[str, Any]]) -> Block:
    panels = [
        *_panels(models, "radius", "Radius of the stream, RMS", "radius", log=True),
        *_panels(models, "update", "Length of the update, RMS", "update", log=True),
    ]
    caption = (
        "Length of the stream before each sub-layer, and of what the sub-layer gives to it, both divided by the square "
        "root of the width. Where the first grows as fast as the second, the angle stays."
    )
    return Block("lengths", panels, caption)


def _along(models: list[dict[str, Any]]) -> Block:
    panels = [
        *_panels(models, "along", "Part of the update along the stream, RMS", "along"),
        *_panels(models, "across", "Part across the stream, RMS", "across", log=True),
    ]
    caption = (
        "The update taken apart: along the stream it changes the radius (above zero it lengthens, below it shortens), "
        "across it turns. geonorm keeps the second part alone."
    )
    return Block("along", panels, caption)


def _alpha(models: list[dict[str, Any]]) -> Block:
    panels = _panels(models, "alpha", "Step size that geonorm would need", "alpha", log=True)
    caption = (
        "Step size with which geonorm, on its sphere of RMS 1, would turn the stream by the same angle for the same "
        "sub-layer output. A model that adds to a growing stream has a decay built in: this is it."
    )
    return Block("alpha", panels, caption)


def _gradient(models: list[dict[str, Any]]) -> Block | None:
    if not any(model["gradient_norms"] for model in models):
        return None
    lines = []
    for index, model in enumerate(models):
        if model["gradient_norms"]:
            values = np.array(model["gradient_norms"], dtype=float)
            name = model["name"] if len(models) > 1 else "blocks"
            lines.append(
                Line(name, style.look(index).line, Curve(np.arange(1, len(values) + 1), values, values, values))
            )
    heading = "Norm of the gradient"
    drawn = _panel(heading, lines, "gradient", np.concatenate([line.curve.y for line in lines]), log=True)
    caption = (
        "Norm of the gradient of each block's parameters for the mean loss on this text. A line that falls to the "
        "right means that the lower layers get the larger gradients."
    )
    return Block("gradient", [drawn], caption)


def _panels(
    models: list[dict[str, Any]], quantity: str, title: str, name: str, *,
    log: bool = False, scale: float = 1.0, laws: bool = False,
) -> list[Panel]:  # fmt: skip
    """One panel with a line for each kind of sub-layer, or for several models one panel a kind with a line a model."""
    curves = {
        (index, kind): _curve(model, kind, quantity, scale) for index, model in enumerate(models) for kind in SUBLAYERS
    }
    values = np.concatenate([part for curve in curves.values() for part in (curve.y, curve.low, curve.high)])
    values = values[np.isfinite(values)]
    if len(models) > 1:
        found = []
        for kind in SUBLAYERS:
            lines = [Line(model["name"], style.look(i).line, curves[i, kind]) for i, model in enumerate(models)]
            found.append(_panel(f"{title}: {SERIES_NAMES[kind]}", lines, f"{name}-{kind}", values, log=log))
        return found
    lines = [Line(SERIES_NAMES[kind], style.look(i).line, curves[0, kind]) for i, kind in enumerate(SUBLAYERS)]
    extra = [
        (style.look(i).line["color"], models[0]["laws"][kind]["inner"]) for i, kind in enumerate(SUBLAYERS) if laws
    ]
    return [_panel(title, lines, name, values, log=log, laws=extra, depth=models[0]["num_layers"], scale=scale)]


def _panel(
    heading: str, lines: list[Line], name: str, values: np.ndarray, *,
    log: bool = False, laws: Any = (), depth: int = 0, scale: float = 1.0,
) -> Panel:  # fmt: skip
    figure, axes = panel(heading, "layer")
    layers = max(len(line.curve.x) for line in lines)
    log = log and values.min() > 0 and values.max() / values.min() > _WIDE_SPAN
    depth_axes(axes, layers, values, log=log)
    for colour, fits in laws:
        _draw_law(axes, colour, fits, depth, scale)
    draw_lines(figure, axes, lines, markers=layers <= 16)
    ends = ", ".join(f"{line.name} {line.curve.y[0]:.3g} to {line.curve.y[-1]:.3g}" for line in lines)
    return Panel(name, f"{heading} by layer, first to last layer: {ends}.", figure)


def _draw_law(axes: Axes, colour: Any, fits: dict[str, Any], depth: int, scale: float) -> None:
    if fits["best"] is None:
        return
    best = best_fit(fits)
    layers = np.linspace(2, depth - 1, 200)
    if best["law"] == "power":
        shape = layers ** -best["exponent"]
    else:
        shape = np.array([DECAYS[best["law"]](layer, depth) for layer in layers])
    axes.plot(layers, scale * best["scale"] * shape, color=colour, linestyle=(0, (4, 3)), linewidth=0.9, zorder=2)


def _curve(model: dict[str, Any], kind: str, quantity: str, scale: float) -> Curve:
    rows = [row for row in model["sublayers"] if row["sublayer"] == kind]
    low, middle, high = (
        # What no token had, such as a step size where nothing turns, is a gap in the line.
        scale * np.array([math.nan if row[quantity][key] is None else row[quantity][key] for row in rows])
        for key in ("q25", "median", "q75")
    )
    return Curve(np.array([row["layer"] for row in rows]), middle, low, high)
