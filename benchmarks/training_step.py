"""A training step of one Llama with each placement: ``python -m benchmarks.training_step``.

Forward + backward + AdamW, and forward + backward alone, eager and compiled, over the same with Pre-Norm, and over the
matrix products alone. ``blocks`` leaves out embedding, head and loss, whose cost is the same for all and hides ratios.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Budget, clock, command_line, fill, header, ratio, report, spread, take_turns
from benchmarks.model import (
    SIZES,
    STOCK,
    ModelSettings,
    Shape,
    adamw,
    build,
    loss_of,
    make_batch,
    record_products,
    shape_of,
)
from geonorm.errors import UserError
from geonorm.placements import available
from geonorm.training.validation import autocast

BASELINE = "pre"
# Nothing more is compiled once less than this share of the time is left.
TIME_TO_MEASURE = 0.4
PRODUCTS, ATTENTION = "matrix products", "attention alone"


@dataclasses.dataclass(frozen=True)
class TrainingSettings(ModelSettings):
    """A training step."""

    placements: tuple[str, ...] | None = None
    """Placements in eager mode; stock is the unchanged model."""
    compiled: tuple[str, ...] | None = None
    """Placements under torch.compile too; each takes half a minute and more to compile, its blocks again."""
    blocks: bool = True
    """Time the blocks alone too, for geonorm and pre."""


EVERY = (STOCK, *available())
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {**SIZES["cpu"], "placements": EVERY, "compiled": ("pre", "geonorm"), "rounds": 5},
    "cuda": {**SIZES["cuda"], "placements": EVERY, "compiled": ("pre", "geonorm"), "rounds": 20},
    "quick": {**SIZES["quick"], "placements": EVERY, "compiled": (), "rounds": 3},
}


def check(models: dict[str, Any], ids: Tensor, precision: str) -> dict[str, float]:
    """Losses before any timing: finite, and that of ``pre`` the stock model's to the last bit."""
    with torch.no_grad():
        losses = {name: loss_of(model, ids, precision).item() for name, model in models.items()}
    assert all(math.isfinite(loss) for loss in losses.values()), losses
    if STOCK in losses and BASELINE in losses:
        assert losses[STOCK] == losses[BASELINE], losses
    return losses


def step_of(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, settings: TrainingSettings) -> Callable:
    """One step that returns seconds of forward + backward, and of all."""
    precision, now = shape_of(settings).precision, clock(settings)

    def step() -> tuple[float, float]:
        start = now()
        loss_of(model, ids, precision).backward()
        middle = now()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = now()
        return middle - start, end - start

    return step


def blocks_of(base: Any, h: Tensor, g: Tensor, settings: TrainingSettings) -> Callable:
    """Forward and backward of the model without embedding, head and loss."""
    precision, now = shape_of(settings).precision, clock(settings)

    def step() -> tuple[float, None]:
        leaf = h.detach().requires_grad_()
        start = now()
        with autocast(h.device, precision):
            output = base(inputs_embeds=leaf, use_cache=False).last_hidden_state
        output.backward(g.to(output.dtype))
        seconds = now() - start
        base.zero_grad(set_to_none=True)
        return seconds, None

    return step


def alone(work: Callable[[], None], now: Callable[[], float]) -> Callable:
    def step() -> tuple[float, None]:
        start = now()
        work()
        return now() - start, None

    return step


def run(settings: TrainingSettings) -> dict[str, Any]:
    """Check, time, report."""
    settings = fill(settings, PRESETS)
    shape, placements, compiled = shape_of(settings), settings.placements or (), settings.compiled or ()
    assert settings.rounds is not None
    for name in (*placements, *compiled):
        if name not in EVERY:
            raise UserError(f"`placements` and `compiled` must be of {', '.join(EVERY)}, got {name!r}")
    if BASELINE not in placements or not set(compiled) <= set(placements):
        raise UserError(
            f"`placements` must hold {BASELINE!r}, what the others are measured against, and all of `compiled`"
        )
    budget, result = Budget(settings.seconds), header("training_step", settings)
    ids = make_batch(shape, settings.device)
    models = {name: build(name, shape, settings.device) for name in placements}
    result["losses_before"] = check(models, ids, shape.precision)
    optimizers = {name: adamw(model) for name, model in models.items()}
    products, attention, result["num_products"] = record_products(models[BASELINE], ids, shape.precision)

    turns: dict[str, Callable[[], Any]] = {
        PRODUCTS: alone(products, clock(settings)),
        ATTENTION: alone(attention, clock(settings)),
    }
    h, g = (torch.randn(shape.batch, shape.tokens, shape.width, device=settings.device) for _ in range(2))
    compile_seconds, left_out = {}, []
    for mode, part, name in plan(settings):
        label, call = f"{part} {mode} {name}", models[name] if part == "step" else models[name].model
        if mode == "compiled":
            if budget.left < TIME_TO_MEASURE * (settings.seconds or 0):
                left_out.append(label)
                continue
            call = torch.compile(call)
        step = step_of(call, optimizers[name], ids, settings) if part == "step" else blocks_of(call, h, g, settings)
        if mode == "compiled":
            compile_seconds[label] = step()[0]
        turns[label] = step
    times = take_turns(turns, settings.rounds, warm_up=1, budget=budget)
    rows = summarise(times, shape)
    result |= {"compile_seconds": compile_seconds, "left_out_for_time": left_out, "rows": rows, "seconds": budget.used}
    report("training_step", settings, result, {f"Training step: Llama, {shape}": rows})
    return result


def plan(settings: TrainingSettings) -> list[tuple[str, str, str]]:
    """Mode, part and placement of every contender, what is wanted most first."""
    return [
        (mode, part, name)
        for mode, names in (("eager", settings.placements), ("compiled", settings.compiled))
        for part in ("step", "blocks")
        for name in names or ()
        if part == "step" or (settings.blocks and name in ("geonorm", BASELINE))
    ]


def summarise(times: dict[str, list[tuple[float, float | None]]], shape: Shape) -> list[dict[str, Any]]:
    """One row a contender and phase, with its ratios over Pre-Norm in the same mode and over the products."""
    products = [first for first, _ in times[PRODUCTS]]
    rows = [{"part": label, "ms": scaled([first for first, _ in times[label]])} for label in (PRODUCTS, ATTENTION)]
    for label, pairs in times.items():
        part, _, rest = label.partition(" ")
        mode, _, name = rest.partition(" ")
        if label in (PRODUCTS, ATTENTION):
            continue
        phases = ["forward + backward", "with AdamW"] if part == "step" else ["blocks, forward + backward"]
        for index, phase in enumerate(phases):
            values = [pair[index] for pair in pairs]
            row: dict[str, Any] = {"part": phase, "mode": mode, "placement": name, "ms": scaled(values)}
            if (base := times.get(f"{part} {mode} {BASELINE}")) is not None:
                row["over_pre"] = ratio(values, [pair[index] for pair in base])  # type: ignore[misc]
            row["over_products"] = ratio(values, products)
            if part == "step":
                row["tokens_per_second"] = round(shape.batch * shape.tokens / spread(values)["median"])
            rows.append(row)
    return sorted(rows, key=lambda row: (row["part"], row.get("mode", "")))


def scaled(seconds: list[float]) -> dict[str, Any]:
    return spread([value * 1e3 for value in seconds])


if __name__ == "__main__":
    command_line(TrainingSettings, run, __doc__)
