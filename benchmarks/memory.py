"""Bytes kept for the backward pass, by the step and by a whole block: ``python -m benchmarks.memory``.

Counted by hooks on what autograd saves, each storage once, parameters not. Exact and free of noise. A block's bytes are
those of a model with three layers less those of one with two.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Budget, command_line, fill, header, report
from benchmarks.model import SIZES, STOCK, ModelSettings, build, make_batch, shape_of
from benchmarks.step import contenders, leaves
from geonorm.errors import UserError
from geonorm.ops.availability import interpreting
from geonorm.placements import available
from geonorm.training.validation import autocast


@dataclasses.dataclass(frozen=True)
class MemorySettings(ModelSettings):
    """Memory for the backward pass."""

    placements: tuple[str, ...] | None = None
    """Placements; stock is the unchanged model."""
    compiled: bool = False
    """Blocks under torch.compile too, which takes minutes: the compiler chooses itself what to keep."""


EVERY = (STOCK, *available())
PRESETS: dict[str, dict[str, Any]] = {key: {**sizes, "placements": EVERY} for key, sizes in SIZES.items()}
STEP_SHAPE = (64, 512)


@contextlib.contextmanager
def saved_bytes(parameters: Iterator[Tensor] | None = None) -> Iterator[Callable[[], int]]:
    """Count what autograd saves in the context; ask the returned function, before the graph is used up."""
    # Storages are held, or another could take the address of one that is gone.
    kept: dict[int, torch.UntypedStorage] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters or ()}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield lambda: sum(storage.nbytes() for storage in kept.values())


def of_step(dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Bytes kept by each implementation, by geoopt and by add + RMSNorm, over those of x and u."""
    rows = []
    x, u, weight, _ = leaves(STEP_SHAPE, dtype, device)
    num_rows, inputs = STEP_SHAPE[0], x.nbytes + u.nbytes
    for name, (kind, function) in contenders(device, compiled=False).items():
        if name == "triton" and interpreting() and device == "cpu":
            continue
        try:
            with saved_bytes(iter([weight])) as count:
                # The outputs must live: what they keep would be freed with them.
                outputs = function(x, u, weight)
                total = count()
        except (UserError, KeyError):
            continue
        assert outputs[0].requires_grad
        beyond = (total - inputs) / num_rows
        rows.append(
            {"name": name, "kind": kind, "dtype": str(dtype).removeprefix("torch."), "bytes": total,
             "x_and_u": inputs, "over_x_and_u": total / inputs, "bytes_a_row_beyond": beyond}
        )  # fmt: skip
    return rows


def of_model(name: str, settings: MemorySettings, layers: int, compiled: bool) -> int:
    """Bytes kept by a whole model with this many layers, without head and loss."""
    shape = dataclasses.replace(shape_of(settings), layers=layers, vocab=64)
    model = build(name, shape, settings.device)
    call: nn.Module = torch.compile(model.model) if compiled else model.model  # type: ignore[assignment]
    ids = make_batch(shape, settings.device)
    with autocast(ids.device, shape.precision), saved_bytes(model.parameters()) as count:
        output = call(input_ids=ids, use_cache=False).last_hidden_state
        total = count()
    assert bool(output.isfinite().all())
    return total


def run(settings: MemorySettings) -> dict[str, Any]:
    """Count, report."""
    settings = fill(settings, PRESETS)
    budget, result, shape = Budget(settings.seconds), header("memory", settings), shape_of(settings)
    for name in settings.placements or ():
        if name not in EVERY:
            raise UserError(f"`placements` must be of {', '.join(EVERY)}, got {name!r}")
    step = [row for dtype in (torch.float32, torch.bfloat16) for row in of_step(dtype, settings.device)]
    blocks: list[dict[str, Any]] = []
    stream = shape.width * (2 if shape.precision == "bf16" else 4)
    for mode in ("eager", "compiled") if settings.compiled else ("eager",):
        for name in settings.placements or ():
            if budget.left <= 0:
                continue
            # One more layer than two: the first and the last block also close the stream.
            two, three = (of_model(name, settings, layers, mode == "compiled") for layers in (2, 3))
            per_token = (three - two) / (shape.batch * shape.tokens)
            blocks.append({"placement": name, "mode": mode, "bytes_a_token": per_token, "streams": per_token / stream})
            torch.compiler.reset()
    for row in blocks:
        base = next((other for other in blocks if other["placement"] == "pre" and other["mode"] == row["mode"]), None)
        row["over_pre"] = None if base is None else row["bytes_a_token"] / base["bytes_a_token"]
    result |= {"step": step, "blocks": blocks, "seconds": budget.used}
    titles = f"The step of {STEP_SHAPE[0]} x {STEP_SHAPE[1]}", f"A block, {shape}"
    report("memory", settings, result, dict(zip(titles, (step, blocks), strict=True)))
    return result


if __name__ == "__main__":
    command_line(MemorySettings, run, __doc__)
