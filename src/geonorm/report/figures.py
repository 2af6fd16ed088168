"""The figures of the report, drawn with matplotlib's object interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from geonorm.report import style
from geonorm.report.curves import Curve, depth_curve, loss_curve, smoothing_window, top_of_pack
from geonorm.report.load import Run, Series
from geonorm.report.sensitivity import draw_sensitivity, tried_rates

WIDTH, HEIGHT = 6.0, 4.0
LEFT, TOP, BOTTOM = 0.5, 0.42, 0.5
ROW = 0.19
LONGEST_DIRECT_LABEL = 22


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


def make_figures(run: Run) -> list[Block]:
    """Draw every figure that the run has data for; call and save them inside `style.context`.

    Returns:
        blocks among ``loss``, ``lr``, ``gradient`` and ``angle``, in that order.
    """
    blocks = [_loss(run), _sensitivity(run), _gradient(run), _angle(run)]
    return [block for block in blocks if block is not None]


def _loss(run: Run) -> Block | None:
    window = smoothing_window(run.series)
    drawn: dict[str, list[tuple[Series, Curve]]] = {}
    for kind in ("eval", "train"):
        pairs = [(one, loss_curve(one, kind, window if kind == "train" else 1)) for one in run.series]
        drawn[kind] = [(one, curve) for one, curve in pairs if curve is not None]
    curves = [curve for pairs in drawn.values() for _, curve in pairs]
    if not curves:
        return None
    low, high = _loss_limits(curves)
    beyond = [f"{one.short} ends at {curve.y[-1]:.2f}" for one, curve in drawn["eval"] if curve.y[-1] > high]
    cut = any((curve.y[: max(1, len(curve.y) // 3)] > high).any() for curve in curves)
    panels = []
    for kind, title in (("eval", "Validation loss"), ("train", "Training loss")):
        if drawn[kind]:
            figure, axes = _panel(f"{title}, nats per token", "training step")
            axes.set_ylim(low, high)
            axes.set_xlim(0, max(curve.x[-1] for _, curve in drawn[kind]))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            _lines(figure, axes, drawn[kind], run.series, markers=False)
            ends = ", ".join(f"{one.short} {curve.y[-1]:.3f}" for one, curve in drawn[kind])
            panels.append(Panel(f"loss-{kind}", f"{title} against training step. Last values: {ends}.", figure))
    seeds = " Lines are means over seeds, bands their full span." if _several_seeds(run) else ""
    smooth = f" The training loss is a running mean over {window} logged steps." if window > 1 else ""
    top = " The vertical axis leaves out the steep fall at the start." if cut else ""
    off = f" Off the scale: {', '.join(beyond)}." if beyond else ""
    caption = (
        f"Each placement at the learning rate in the table; lower is better.{seeds}{smooth}{top}{off} "
        "A gap that is still closing at the right end might close with longer training."
    )
    return Block("loss", panels, caption)


def _sensitivity(run: Run) -> Block | None:
    shown = [one for one in run.series if one.every]
    # Rates that differ only between placements, as tuned ones do, are no sensitivity.
    if all(len(tried_rates([one])) < 2 for one in shown):
        return None
    figure, axes = _panel("Validation loss, nats per token", "peak learning rate")
    ends, notes = draw_sensitivity(axes, shown, run.series)
    _name_lines(figure, axes, ends, run.series)
    label = "Validation loss against learning rate for " + ", ".join(one.short for one in shown) + "."
    caption = (
        "Final validation loss against peak learning rate. Lines join the means over seeds; small dots are single "
        "seeds. A flat valley means that the rate hardly matters; a lowest point at either end means that the grid "
        f"was too narrow.{notes}"
    )
    return Block("lr", [Panel("learning-rate", label, figure)], caption)


def _gradient(run: Run) -> Block | None:
    panels = _depth_panels(
        run,
        [("grad_norm", False, "gradient-start"), ("grad_norm", True, "gradient-end")],
        lambda field, step: f"Gradient norm at step {step:,}",
    )
    if not panels:
        return None
    caption = (
        "Norm of the gradient of each layer's parameters, from the input (layer 1) to the output, at the first and "
        "the last measurement; both panels share their axes. A level line means that all layers receive gradients of "
        "like size; a line that falls to the right means that the lower layers get the larger ones."
    )
    return Block("gradient", panels, caption)


def _angle(run: Run) -> Block | None:
    names = {"attention": "Attention", "mlp": "MLP"}
    panels = _depth_panels(
        run,
        [("attention", True, "angle-attention"), ("mlp", True, "angle-mlp")],
        lambda field, step: f"{names[field]}: angle in degrees at step {step:,}",
    )
    if not panels:
        return None
    caption = (
        "Angle by which one sub-layer turns the residual stream, median over tokens, at the last measurement; both "
        "panels share their axes. 0 degrees means that the sub-layer leaves the direction as it was. A line that "
        "falls towards zero shows upper layers that change little."
    )
    return Block("angle", panels, caption)


def _depth_panels(run: Run, wanted, title) -> list[Panel]:
    drawn = []
    for field, at_end, name in wanted:
        found = [(one, depth_curve(one, field, at_end=at_end)) for one in run.series]
        pairs = [(one, result) for one, result in found if result is not None]
        if pairs:
            drawn.append((field, name, pairs))
    values = np.concatenate([c.y for *_, pairs in drawn for _, (c, _) in pairs] or [np.array([])])
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    log = drawn[0][0] == "grad_norm" and values.min() > 0 and values.max() / values.min() > 8
    panels = []
    for field, name, pairs in drawn:
        heading = title(field, max(step for _, (_, step) in pairs))
        figure, axes = _panel(heading, "layer")
        depth = max(len(curve.x) for _, (curve, _) in pairs)
        axes.set_xlim(0.6, depth + 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(min(depth, 10), integer=True, min_n_ticks=1))
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(FixedLocator(_log_ticks(values.min(), values.max())))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_ylim(values.min() / 1.25, values.max() * 1.25)
        else:
            axes.set_ylim(0, values.max() * 1.06)
        _lines(figure, axes, [(one, curve) for one, (curve, _) in pairs], run.series, markers=depth <= 16)
        ends = ", ".join(f"{one.short} {c.y[0]:.3g} to {c.y[-1]:.3g}" for one, (c, _) in pairs)
        panels.append(Panel(name, f"{heading} by layer, first to last layer: {ends}.", figure))
    return panels


def _panel(title: str, x_label: str) -> tuple[Figure, Axes]:
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


def _lines(figure: Figure, axes: Axes, pairs, all_series: Sequence[Series], *, markers: bool) -> None:
    ends = []
    for one, curve in reversed(pairs):
        look = style.line_style(one, all_series)
        if np.any(curve.high > curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.13, linewidth=0)
        extra = {"markersize": 5, "markeredgecolor": style.PAPER[0], "markeredgewidth": 0.8}
        if not markers:
            look = {**look, "marker": "o" if len(curve.x) == 1 else ""}
        front = {"zorder": 4, "linewidth": 2.3} if one.row["placement"] == "geonorm" else {"zorder": 3}
        axes.plot(curve.x, curve.y, **look, **extra, **front)  # type: ignore[arg-type]
        ends.append((one, float(curve.x[-1]), float(curve.y[-1])))
    _name_lines(figure, axes, ends, all_series)


def _name_lines(figure: Figure, axes: Axes, ends, all_series: Sequence[Series]) -> None:
    """Write each name at the end of its line, or in rows under the axes where names are long or many."""
    ends = [(one, x, y) for one, x, y in ends if np.isfinite(y)]
    longest = max((len(one.short) for one, *_ in ends), default=0)
    if longest > LONGEST_DIRECT_LABEL or len(ends) > 9:
        _legend(figure, axes, [one for one, *_ in ends], all_series)
        return
    width = max((TextPath((0, 0), one.short, size=style.FONT_SIZE).get_extents().width for one, *_ in ends), default=0)
    left, bottom, _, height = axes.get_position().bounds
    axes.set_position((left, bottom, 1 - left - (width / 72 + 0.24) / WIDTH, height))
    style.measure(figure)
    points = [(axes.transData.transform((x, y)), one) for one, x, y in ends]
    box = axes.get_window_extent()
    points = [(x, min(max(y, box.y0), box.y1), one) for (x, y), one in points]
    gap = style.FONT_SIZE * 1.25
    for (x, y, one), label_y in zip(points, spread([y for _, y, _ in points], gap, box.y0, box.y1), strict=True):
        colour = style.line_style(one, all_series)["color"]
        right = box.x1 + 11
        offset = {"xycoords": "figure pixels", "annotation_clip": False}
        if abs(label_y - y) > 2 or right - x > 20:
            arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
            start = max(x, box.x1) if x > box.x1 - 8 else x
            axes.annotate(
                "", (right - 1, label_y), (start + 3, y), textcoords="figure pixels", arrowprops=arrow, **offset
            )
        axes.annotate(
            one.short, (right + 2, label_y), color=colour, va="center_baseline", parse_math=False, **offset
        )  # fmt: skip


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


def _legend(figure: Figure, axes: Axes, shown: list[Series], all_series: Sequence[Series]) -> None:
    left, bottom, width, height = axes.get_position().bounds
    extra = ROW * len(shown) + 0.1
    tall = HEIGHT + extra
    figure.set_size_inches(WIDTH, tall)
    axes.set_position((left, (bottom * HEIGHT + extra) / tall, width, height * HEIGHT / tall))
    for text in figure.texts:
        text.set_y(1 - 0.2 / tall)
    ordered = sorted(shown, key=lambda one: next(i for i, other in enumerate(all_series) if other is one))
    for index, one in enumerate(ordered):
        y = (extra - 0.05 - ROW * (index + 0.5)) / tall
        look = style.line_style(one, all_series)
        axes.plot([left, left + 0.07], [y, y], transform=figure.transFigure, clip_on=False, markersize=0, **look)  # type: ignore[arg-type]
        figure.text(left + 0.085, y, one.short, color=look["color"], va="center_baseline", parse_math=False)


def _loss_limits(curves: list[Curve]) -> tuple[float, float]:
    low = min(curve.low.min() for curve in curves)
    last = top_of_pack([curve.y[-1] for curve in curves])
    early = float(np.median([np.interp(0.3 * curve.x[-1], curve.x, curve.y) for curve in curves]))
    high = max(early, last + 0.3 * (last - low), low + 0.05)
    return low - 0.04 * (high - low), high


def _log_ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high / low < 300 else (1,)
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)
    return [step * 10.0**power for power in powers for step in steps]


def _several_seeds(run: Run) -> bool:
    return any(sum(metrics.found for metrics in one.metrics) > 1 for one in run.series)
