"""The figures of the report, drawn with matplotlib's object interface."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from geonorm.report.curves import Curve, depth_curve, loss_curve, smoothing_window, top_of_pack
from geonorm.report.drawing import Block, Line, Panel, depth_axes, draw_lines, name_lines, panel
from geonorm.report.load import Run, Series
from geonorm.report.sensitivity import draw_sensitivity, tried_rates


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
            figure, axes = panel(f"{title}, nats per token", "training step")
            axes.set_ylim(low, high)
            axes.set_xlim(0, max(curve.x[-1] for _, curve in drawn[kind]))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            draw_lines(figure, axes, _lines(drawn[kind]), markers=False)
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
    if run.results.rates.selection_seed is None or all(len(tried_rates([one])) < 2 for one in shown):
        return None
    figure, axes = panel("Validation loss, nats per token", "peak learning rate")
    seed = run.results.rates.selection_seed
    ends, notes = draw_sensitivity(axes, shown, seed)
    name_lines(figure, axes, [(one.short, one.look.line, x, y) for one, x, y in ends])
    label = "Validation loss against learning rate for " + ", ".join(one.short for one in shown) + "."
    caption = (
        f"Final validation loss against peak learning rate. Lines join the losses of seed {seed}, which chose rates;"
        " small dots are other seeds. A flat valley means that the rate hardly matters; a lowest point at either end "
        f"means that the grid was too narrow.{notes}"
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
        figure, axes = panel(heading, "layer")
        depth = max(len(curve.x) for _, (curve, _) in pairs)
        depth_axes(axes, depth, values, log=log)
        lines = _lines([(one, curve) for one, (curve, _) in pairs])
        draw_lines(figure, axes, lines, markers=depth <= 16)
        ends = ", ".join(f"{one.short} {c.y[0]:.3g} to {c.y[-1]:.3g}" for one, (c, _) in pairs)
        panels.append(Panel(name, f"{heading} by layer, first to last layer: {ends}.", figure))
    return panels


def _lines(pairs: Sequence[tuple[Series, Curve]]) -> list[Line]:
    return [Line(one.short, one.look.line, curve, front=one.row.placement == "geonorm") for one, curve in pairs]


def _loss_limits(curves: list[Curve]) -> tuple[float, float]:
    low = min(curve.low.min() for curve in curves)
    last = top_of_pack([curve.y[-1] for curve in curves])
    early = float(np.median([np.interp(0.3 * curve.x[-1], curve.x, curve.y) for curve in curves]))
    high = max(early, last + 0.3 * (last - low), low + 0.05)
    return low - 0.04 * (high - low), high


def _several_seeds(run: Run) -> bool:
    return any(sum(metrics.found for metrics in one.metrics) > 1 for one in run.series)
