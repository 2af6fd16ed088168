"""What every figure of the report is built from: panels, lines with their bands, axes by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from geonorm.report.series import Curve
from geonorm.report.style import FONT_SIZE, PAPER, Look

WIDTH, HEIGHT = 6.0, 4.0
# More or longer names stand under the axes instead of beside them.
LONGEST_NAME, MOST_NAMES = 24, 16
# With so many lines markers have to tell them apart.
MANY_LINES = 9
# A logarithmic axis pays only where the values span more than this.
WIDE_SPAN = 8


@dataclass(frozen=True)
class Panel:
    """One drawing: the stem of its files, what it shows in words, and the figure."""

    name: str
    label: str
    figure: Figure


@dataclass(frozen=True)
class Line:
    """One line: its name, how it looks, its points, and whether it lies on top of the others."""

    name: str
    look: Look
    curve: Curve
    front: bool = False


def new_panel(title: str, x_label: str) -> tuple[Figure, Axes]:
    """An empty panel with a heading and the name of its horizontal axis."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    # A heading reads faster than a turned axis label and takes no width from the plot.
    axes.set_title(title)
    axes.set_xlabel(x_label, loc="right")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    return figure, axes


def draw_lines(figure: Figure, axes: Axes, lines: Sequence[Line], *, markers: bool) -> None:
    """Draw lines with their bands, the first on top, and name them; markers help where lines are many."""
    for place, line in enumerate(reversed(lines)):
        curve = line.curve
        extra: dict[str, Any] = {**line.look.line, "markersize": 5, "markeredgecolor": PAPER, "markeredgewidth": 0.8}
        if np.any(curve.high > curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=line.look.colour, alpha=0.13, linewidth=0)
        if len(lines) > MANY_LINES:
            every = max(1, len(curve.x) // 5)
            extra["markevery"] = (place % every, every)
        elif not markers:
            extra["marker"] = "o" if len(curve.x) == 1 else ""
        extra |= {"zorder": 4, "linewidth": 2.3} if line.front else {"zorder": 3}
        axes.plot(curve.x, curve.y, label=label_of(line.name), **extra)
    add_legend(figure, axes)


def label_of(name: str) -> str:
    """A name as matplotlib puts it into a legend; it leaves those with a leading underscore out."""
    return f" {name}" if name.startswith("_") else name


def add_legend(figure: Figure, axes: Axes) -> None:
    """Name the labelled lines beside the axes, in the order in which they end, or under them where that is wider."""
    handles, names = axes.get_legend_handles_labels()
    ends: list[Any] = [np.nan_to_num(handle.get_ydata()[-1], nan=-np.inf) for handle in handles]  # type: ignore[attr-defined]
    order = np.argsort(ends, kind="stable")[::-1]
    handles, names = [handles[index] for index in order], [names[index] for index in order]
    if max(map(len, names), default=0) > LONGEST_NAME or len(names) > MOST_NAMES:
        figure.set_figheight(HEIGHT + len(names) * 1.4 * FONT_SIZE / 72)
        figure.legend(handles, names, loc="outside lower left", labelspacing=0.25)
    elif names:
        figure.legend(handles, names, loc="outside right center")


def depth_panel(name: str, heading: str, lines: Sequence[Line], values: np.ndarray, *, log: bool = False) -> Panel:
    """A panel of quantities by layer.

    Args:
        name: stem of its files.
        heading: what is shown.
        lines: their ``x`` are layers, counted from 1.
        values: that its axis holds, of all panels that share it: from zero, or below where a value is.
        log: allow a logarithmic axis where the values are positive and span much.
    """
    figure, axes = new_panel(heading, "layer")
    depth = max(len(line.curve.x) for line in lines)
    axes.set_xlim(0.6, depth + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(min(depth, 10), integer=True, min_n_ticks=1))
    values = values[np.isfinite(values)]
    least, most = values.min(initial=np.inf), values.max(initial=0.0)
    if log and least > 0 and most / least > WIDE_SPAN:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most / least < 300 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(least / 1.25, most * 1.25)
    else:
        low = min(0.0, least)
        room = 0.06 * ((most - low) or 1.0)
        axes.set_ylim(low - room if low else 0.0, most + room)
    draw_lines(figure, axes, lines, markers=depth <= 16)
    ends = ", ".join(f"{line.name} {line.curve.y[0]:.3g} to {line.curve.y[-1]:.3g}" for line in lines)
    return Panel(name, f"{heading} by layer, first to last layer: {ends}.", figure)
