"""The plot of validation loss against learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from geonorm.report import style
from geonorm.report.curves import top_of_pack
from geonorm.report.format import learning_rate
from geonorm.report.load import Series


def tried_rates(all_series: Sequence[Series]) -> list[float]:
    """Every learning rate of any trial, ascending."""
    return sorted({trial.lr for one in all_series for trial in one.every})


def draw_sensitivity(axes: Axes, shown: Sequence[Series], seed: int | None):
    """Draw one line a series over its finished trials of a seed, and a cross for every rate at which one diverged.

    Returns:
        the end point of each line as ``(series, x, y)``, and sentences for the caption on what lies outside the axis.
    """
    finished = {id(one): _finished(one, seed) for one in shown}
    rates = tried_rates(shown)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.15, rates[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(_spaced(rates)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: learning_rate(value))
    low, high = _limits([list(losses.values()) for losses in finished.values() if losses])
    diverged = {id(one): sorted({t.lr for t in one.every if t.status == "diverged"}) for one in shown}
    any_diverged = any(diverged.values())
    room = 0.16 * (high - low) if any_diverged else 0.05 * (high - low)
    axes.set_ylim(low - 0.05 * (high - low), high + room)
    ends: list[tuple[Series, float, float]] = []
    arrows: dict[float, int] = defaultdict(int)
    crosses: dict[float, int] = defaultdict(int)
    for one in reversed(shown):
        look = one.look.line
        points = sorted(finished[id(one)].items())
        front = 4 if one.row.placement == "geonorm" else 3
        if points:
            x, y = (np.array(column) for column in zip(*points, strict=True))
            axes.plot(x, y, zorder=front, markeredgecolor=style.PAPER[0], markeredgewidth=0.8, markersize=6.5, **look)  # type: ignore[arg-type]
            others = [(t.lr, t.val_loss) for t in one.every if t.status == "ok" and t.seed != seed and t.val_loss]
            if others:
                axes.plot(*zip(*others, strict=True), ".", color=look["color"], markersize=3.5, alpha=0.7)
            ends.append((one, float(x[-1]), float(y[-1])))
            for lr, loss in points:
                if loss > high + room:
                    _arrow(axes, lr, loss, high + room, look["color"], arrows[lr], inward=lr == rates[-1])
                    arrows[lr] += 1
        for lr in diverged[id(one)]:
            shift = 1 + 0.028 * crosses[lr]
            crosses[lr] += 1
            axes.plot(
                lr / shift, high + 0.1 * (high - low), "x", color=look["color"], markersize=7, markeredgewidth=2
            )  # fmt: skip
    if any_diverged:
        axes.annotate("\N{MULTIPLICATION SIGN} diverged", (1, 1), (0, 0.22 * 72), xycoords="axes fraction",
                      textcoords="offset points", color=style.MUTED[0], ha="right", va="center")  # fmt: skip
    notes = " A cross marks a rate at which a trial diverged." if any_diverged else ""
    if arrows:
        notes += " An arrow with a number is a loss off the scale."
    return ends, notes


def _arrow(axes: Axes, lr: float, loss: float, top: float, colour: object, rank: int, *, inward: bool) -> None:
    # Beside the crosses of diverged trials, which stand at the rate itself.
    side, align = (-9, "right") if inward else (9, "left")
    axes.annotate(
        f"\N{UPWARDS ARROW} {loss:.2f}", (lr, top), (side, -1 - 1.2 * style.FONT_SIZE * rank),
        textcoords="offset points", ha=align, va="top", color=colour, size=style.FONT_SIZE - 1,
    )  # fmt: skip


def _finished(one: Series, seed: int | None) -> dict[float, float]:
    return {
        trial.lr: trial.val_loss
        for trial in one.every
        if trial.status == "ok" and trial.seed == seed and trial.val_loss is not None
    }


def _limits(losses: list[list[float]]) -> tuple[float, float]:
    """From the best loss to well above the worst of the rows' best, so that one collapsed trial hides nothing."""
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
