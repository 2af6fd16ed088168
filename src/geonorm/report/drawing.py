"""How every figure of the report is built: panels, lines with their names at the end, axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from geonorm.report import style
from geonorm.report.curves import Curve

WIDTH, HEIGHT = 6.0, 4.0
LEFT, TOP, BOTTOM = 0.5, 0.42, 0.5
ROW = 0.19
LONGEST_DIRECT_LABEL = 22
MOST_DIRECT_LABELS = 9


@dataclass(frozen=True)
class Panel:
    """One drawing: the stem of its files, what it shows in words, and the figure."""

    name: str
    label: str
    figure: Figure


@dataclass(frozen=True)
class Block:
    """Panels that share a caption."""

    key: str
    panels: list[Panel]
    caption: str


@dataclass(frozen=True)
class Line:
    """One line: its name, colour and dashes for matplotlib, its points, and whether it lies on top of the others."""

    name: str
    look: dict[str, Any]
    curve: Curve
    front: bool = False


def panel(title: str, x_label: str) -> tuple[Figure, Axes]:
    """An empty panel with a heading and the name of its horizontal axis."""
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="none")
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + 0.2) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT), facecolor="none"
    )
    # A heading reads faster than a turned axis label and takes no width from the plot.
    figure.text(0.02 / WIDTH, 1 - 0.2 / HEIGHT, title, size=style.FONT_SIZE + 0.5, weight="bold", va="center")
    axes.set_xlabel(x_label, loc="right", labelpad=3)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.spines["left"].set_visible(False)
    axes.tick_params(pad=4)
    return figure, axes


def depth_axes(axes: Axes, depth: int, values: np.ndarray, *, log: bool) -> None:
    """Axes for a quantity by layer 1 to ``depth``: from zero, or logarithmic; below zero where a value is."""
    axes.set_xlim(0.6, depth + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(min(depth, 10), integer=True, min_n_ticks=1))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(values.min(), values.max())))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(values.min() / 1.25, values.max() * 1.25)
    else:
        low, high = min(0.0, values.min()), max(0.0, values.max())
        room = 0.06 * ((high - low) or 1.0)
        axes.set_ylim(low - room if low else 0.0, high + room)


def draw_lines(figure: Figure, axes: Axes, lines: Sequence[Line], *, markers: bool) -> None:
    """Draw lines with their bands, the first on top, and name them; markers help where lines are many."""
    ends = []
    for place, line in enumerate(reversed(lines)):
        look, curve = line.look, line.curve
        if np.any(curve.high > curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.13, linewidth=0)
        extra: dict[str, Any] = {"markersize": 5, "markeredgecolor": style.PAPER[0], "markeredgewidth": 0.8}
        if len(lines) > MOST_DIRECT_LABELS:
            every = max(1, len(curve.x) // 5)
            extra["markevery"] = (place % every, every)
        elif not markers:
            look = {**look, "marker": "o" if len(curve.x) == 1 else ""}
        front = {"zorder": 4, "linewidth": 2.3} if line.front else {"zorder": 3}
        axes.plot(curve.x, curve.y, **look, **extra, **front)  # type: ignore[arg-type]
        ends.append((line.name, line.look, float(curve.x[-1]), float(curve.y[-1])))
    name_lines(figure, axes, ends)


def name_lines(figure: Figure, axes: Axes, ends: Sequence[tuple[str, dict[str, Any], float, float]]) -> None:
    """Write each name at the end of its line, or in rows under the axes where names are long or many.

    Args:
        figure: the figure of ``axes``.
        axes: where the lines are.
        ends: name, look and end point of each line; rows under the axes are in the reverse of this order.
    """
    ends = [end for end in ends if np.isfinite(end[3])]
    longest = max((len(name) for name, *_ in ends), default=0)
    if longest > LONGEST_DIRECT_LABEL or len(ends) > MOST_DIRECT_LABELS:
        _legend(figure, axes, [(name, look) for name, look, *_ in reversed(ends)])
        return
    width = max((TextPath((0, 0), name, size=style.FONT_SIZE).get_extents().width for name, *_ in ends), default=0)
    left, bottom, _, height = axes.get_position().bounds
    axes.set_position((left, bottom, 1 - left - (width / 72 + 0.24) / WIDTH, height))
    style.measure(figure)
    box = axes.get_window_extent()
    points = [(*axes.transData.transform((x, y)), name, look["color"]) for name, look, x, y in ends]
    points = [(x, min(max(y, box.y0), box.y1), name, colour) for x, y, name, colour in points]
    gap = style.FONT_SIZE * 1.25
    placed = spread([y for _, y, *_ in points], gap, box.y0, box.y1)
    for (x, y, name, colour), label_y in zip(points, placed, strict=True):
        right = box.x1 + 11
        offset = {"xycoords": "figure pixels", "annotation_clip": False}
        if abs(label_y - y) > 2 or right - x > 20:
            arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
            start = max(x, box.x1) if x > box.x1 - 8 else x
            axes.annotate(
                "", (right - 1, label_y), (start + 3, y), textcoords="figure pixels", arrowprops=arrow, **offset
            )
        axes.annotate(name, (right + 2, label_y), color=colour, va="center_baseline", parse_math=False, **offset)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as can be to ``wanted``, at least ``gap`` apart, from ``low`` to ``high`` if they fit."""
    order = np.argsort(wanted, kind="stable")
    groups: list[list[float]] = []  # each: sum of (wanted - offset inside the group), count
    for value in (wanted[index] for index in order):
        groups.append([value, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] + groups[-2][1] * gap > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total - count * groups[-1][1] * gap
            groups[-1][1] += count
    placed = [total / count + step * gap for total, count in groups for step in range(int(count))]
    for index in range(len(placed)):
        placed[index] = max(placed[index], low + index * gap)
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], high - (len(placed) - 1 - index) * gap)
    result = [0.0] * len(placed)
    for position, index in zip(placed, order, strict=True):
        result[index] = position
    return result


def _legend(figure: Figure, axes: Axes, shown: Sequence[tuple[str, dict[str, Any]]]) -> None:
    left, bottom, width, height = axes.get_position().bounds
    extra = ROW * len(shown) + 0.1
    tall = HEIGHT + extra
    figure.set_size_inches(WIDTH, tall)
    axes.set_position((left, (bottom * HEIGHT + extra) / tall, width, height * HEIGHT / tall))
    for text in figure.texts:
        text.set_y(1 - 0.2 / tall)
    for index, (name, look) in enumerate(shown):
        y = (extra - 0.05 - ROW * (index + 0.5)) / tall
        size = 5 if len(shown) > MOST_DIRECT_LABELS else 0
        axes.plot([left, left + 0.07], [y, y], transform=figure.transFigure, clip_on=False, markersize=size, **look)
        figure.text(left + 0.085, y, name, color=look["color"], va="center_baseline", parse_math=False)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis."""
    steps = (1, 2, 5) if high / low < 300 else (1,)
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)
    return [step * 10.0**power for power in powers for step in steps]
