"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from geonorm.report.format import learning_rate
from geonorm.report.page import Section
from geonorm.report.plots import Line, Panel, add_legend, depth_panel, draw_lines, label_of, new_panel
from geonorm.report.series import Curve, Series, smoothing_window, top_of_pack
from geonorm.report.style import FONT_SIZE, MUTED, PAPER

GRADIENT = (
    "Gradient norm by layer",
    "Norm of the gradient of each layer's parameters, from the input (layer 1) to the output, at the first and the "
    "last measurement; both panels share their axes. A level line means that all layers receive gradients of like "
    "size; a line that falls to the right means that the lower layers get the larger ones.",
)
ANGLE = (
    "Angle of each step by layer",
    "Angle by which one sub-layer turns the residual stream, median over tokens, at the last measurement; both panels "
    "share their axes. 0 degrees means that the sub-layer leaves the direction as it was. A line that falls towards "
    "zero shows upper layers that change little.",
)


def comparison_figures(series: list[Series], selection_seed: int | None) -> list[Section]:
    """Draw every figure that there is data for; call and save them inside `style.context`.

    Args:
        series: the rows of one variant.
        selection_seed: the seed that chose the learning rates, if one did.

    Returns:
        loss, learning rates, gradient and angle, in this order, without those that lack data.
    """
    gradient = [("grad_norm", end, f"gradient-{name}", "Gradient norm") for end, name in ((0, "start"), (1, "end"))]
    names = {"attention": "Attention", "mlp": "MLP"}
    angle = [(kind, 1, f"angle-{kind}", f"{name}: angle in degrees") for kind, name in names.items()]
    sections = [
        _loss(series),
        _sensitivity(series, selection_seed),
        _by_layer(series, gradient, *GRADIENT),
        _by_layer(series, angle, *ANGLE),
    ]
    return [section for section in sections if section.panels]


def _loss(series: list[Series]) -> Section:
    title = "Loss during training"
    window = smoothing_window(series)
    drawn: dict[str, list[tuple[Series, Curve]]] = {}
    for kind in ("eval", "train"):
        pairs = [(one, one.loss_curve(kind, window if kind == "train" else 1)) for one in series]
        drawn[kind] = [(one, curve) for one, curve in pairs if curve is not None]
    curves = [curve for pairs in drawn.values() for _, curve in pairs]
    if not curves:
        return Section(title)
    low, high = _loss_limits(curves)
    panels = []
    for kind, name in (("eval", "Validation loss"), ("train", "Training loss")):
        if drawn[kind]:
            figure, axes = new_panel(f"{name}, nats per token", "training step")
            axes.set_ylim(low, high)
            axes.set_xlim(0, max(curve.x[-1] for _, curve in drawn[kind]))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            draw_lines(figure, axes, _lines(drawn[kind]), markers=False)
            ends = ", ".join(f"{one.short} {curve.y[-1]:.3f}" for one, curve in drawn[kind])
            panels.append(Panel(f"loss-{kind}", f"{name} against training step. Last values: {ends}.", figure))
    sentences = ["Each placement at the learning rate in the table; lower is better."]
    if any(sum(metrics.found for metrics in one.metrics) > 1 for one in series):
        sentences.append("Lines are means over seeds, bands their full span.")
    if window > 1:
        sentences.append(f"The training loss is a running mean over {window} logged steps.")
    if any((curve.y[: max(1, len(curve.y) // 3)] > high).any() for curve in curves):
        sentences.append("The vertical axis leaves out the steep fall at the start.")
    beyond = [f"{one.short} ends at {curve.y[-1]:.2f}" for one, curve in drawn["eval"] if curve.y[-1] > high]
    if beyond:
        sentences.append(f"Off the scale: {', '.join(beyond)}.")
    sentences.append("A gap that is still closing at the right end might close with longer training.")
    return Section(title, panels=panels, caption=" ".join(sentences))


def _loss_limits(curves: list[Curve]) -> tuple[float, float]:
    low = min(curve.low.min() for curve in curves)
    last = top_of_pack([curve.y[-1] for curve in curves])
    early = float(np.median([np.interp(0.3 * curve.x[-1], curve.x, curve.y) for curve in curves]))
    high = max(early, last + 0.3 * (last - low), low + 0.05)
    return low - 0.04 * (high - low), high


def _by_layer(series: list[Series], wanted: Sequence[tuple], title: str, caption: str) -> Section:
    drawn = []
    for field, at_end, name, heading in wanted:
        found = [(one, one.depth_curve(field, at_end=bool(at_end))) for one in series]
        pairs = [(one, *result) for one, result in found if result is not None]
        if pairs:
            drawn.append((name, f"{heading} at step {max(step for *_, step in pairs):,}", pairs))
    values = np.concatenate([curve.y for *_, pairs in drawn for _, curve, _ in pairs] or [np.array([])])
    if not np.isfinite(values).any():
        return Section(title)
    log = wanted[0][0] == "grad_norm"
    panels = [
        depth_panel(name, heading, _lines([(one, curve) for one, curve, _ in pairs]), values, log=log)
        for name, heading, pairs in drawn
    ]
    return Section(title, panels=panels, caption=caption)


def _lines(pairs: Sequence[tuple[Series, Curve]]) -> list[Line]:
    return [Line(one.short, one.look, curve, front=one.row.placement == "geonorm") for one, curve in pairs]


def _sensitivity(series: list[Series], seed: int | None) -> Section:
    """One line a row over its finished trials of the seed that chose, a cross for every rate at which one diverged."""
    title = "Sensitivity to the learning rate"
    rates = sorted({trial.lr for one in series for trial in one.every})
    # Rates that differ only between placements, as tuned ones do, are no sensitivity.
    if seed is None or all(len({trial.lr for trial in one.every}) < 2 for one in series):
        return Section(title)
    figure, axes = new_panel("Validation loss, nats per token", "peak learning rate")
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.15, rates[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(_spaced(rates)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: learning_rate(value))
    # By row: whether the seed is the one that chose, learning rate, loss.
    losses = [
        sorted((t.seed == seed, t.lr, t.val_loss) for t in one.every if t.status == "ok" and t.val_loss is not None)
        for one in series
    ]
    low, high = _limits([[loss for chose, _, loss in points if chose] for points in losses])
    diverged = [sorted({trial.lr for trial in one.every if trial.status == "diverged"}) for one in series]
    top = high + (0.16 if any(diverged) else 0.05) * (high - low)
    axes.set_ylim(low - 0.05 * (high - low), top)
    marks = {"markeredgecolor": PAPER, "markeredgewidth": 0.8, "markersize": 6.5}
    above = [0] * len(rates)
    crosses = [0] * len(rates)
    for one, points, lrs in reversed(list(zip(series, losses, diverged, strict=True))):
        chose = [(lr, loss) for mine, lr, loss in points if mine]
        others = [(lr, loss) for mine, lr, loss in points if not mine]
        if chose:
            front = 4 if one.row.placement == "geonorm" else 3
            axes.plot(*zip(*chose, strict=True), label=label_of(one.short), zorder=front, **marks, **one.look.line)
        if chose and others:
            axes.plot(*zip(*others, strict=True), ".", color=one.look.colour, markersize=3.5, alpha=0.7)
        for lr, loss in chose:
            if loss > top:
                rank = rates.index(lr)
                _arrow(axes, lr, loss, top, one.look.colour, above[rank], inward=lr == rates[-1])
                above[rank] += 1
        for lr in lrs:
            shift = 1 + 0.028 * crosses[rates.index(lr)]
            crosses[rates.index(lr)] += 1
            y = high + 0.1 * (high - low)
            axes.plot(lr / shift, y, "x", color=one.look.colour, markersize=7, markeredgewidth=2)
    add_legend(figure, axes)
    caption = (
        f"Final validation loss against peak learning rate. Lines join the losses of seed {seed}, which chose rates;"
        " small dots are other seeds. A flat valley means that the rate hardly matters; a lowest point at either end "
        "means that the grid was too narrow."
    )
    if any(diverged):
        axes.set_title("\N{MULTIPLICATION SIGN} diverged", loc="right", color=MUTED, weight="normal", size=FONT_SIZE)
        caption += " A cross marks a rate at which a trial diverged."
    if any(above):
        caption += " An arrow with a number is a loss off the scale."
    label = f"Validation loss against learning rate for {', '.join(one.short for one in series)}."
    return Section(title, panels=[Panel("learning-rate", label, figure)], caption=caption)


def _arrow(axes: Axes, lr: float, loss: float, top: float, colour: str, rank: int, *, inward: bool) -> None:
    # Beside the crosses of diverged trials, which stand at the rate itself.
    side, align = (-9, "right") if inward else (9, "left")
    axes.annotate(
        f"\N{UPWARDS ARROW} {loss:.2f}", (lr, top), (side, -1 - 1.2 * FONT_SIZE * rank),
        textcoords="offset points", ha=align, va="top", color=colour, size=FONT_SIZE - 1,
    )  # fmt: skip


def _limits(losses: list[list[float]]) -> tuple[float, float]:
    """From the best loss to well above the worst of the rows' best, so that one collapsed trial hides nothing."""
    losses = [values for values in losses if values]
    if not losses:
        return 0.0, 1.0
    best = [min(values) for values in losses]
    low, every, pack = min(best), max(max(values) for values in losses), top_of_pack(best)
    return low, max(min(every, pack + max(1.5 * (pack - low), 0.1)), low + 0.01)


def _spaced(rates: list[float]) -> list[float]:
    kept = [rates[0]]
    for rate in rates[1:]:
        if np.log(rate / kept[-1]) > np.log(rates[-1] / rates[0]) / 7:
            kept.append(rate)
    return kept
