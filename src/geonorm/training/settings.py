"""Settings of one training run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from geonorm.errors import UserError
from geonorm.ranges import FACTOR, POSITIVE, SEED, Count, Number, check_ranges


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How one model is trained. Counts are optimiser steps unless said otherwise.

    Attributes:
        steps: optimiser steps.
        batch: windows in one optimiser step.
        accumulation: micro-batches that one step is split into; the result is the same up to rounding.
        length: tokens a window.
        lr: peak learning rate.
        warmup: steps of linear warm-up.
        min_lr_ratio: the cosine ends at this part of the peak.
        betas, weight_decay: AdamW; gains, biases and step sizes are not decayed.
        clip: upper limit of the gradient norm.
        precision: ``"fp32"``, or ``"bf16"`` for bfloat16 autocast with float32 weights.
        seed: of the weights and of the order of the windows.
        log_every: steps between lines of training loss.
        eval_every: steps between evaluations; the last step is always evaluated.
        eval_windows: number of fixed validation windows.
        layers_every: steps between measurements of every layer; the first and last step are always measured.
    """

    steps: Annotated[int, Count()] = 500
    batch: Annotated[int, Count()] = 16
    accumulation: Annotated[int, Count()] = 1
    length: Annotated[int, Count()] = 128
    lr: Annotated[float, FACTOR] = 4e-3
    warmup: Annotated[int, Count(0)] = 50
    min_lr_ratio: Annotated[float, Number(0, 1)] = 0.1
    betas: Annotated[tuple[float, float], Number(0, 1, below=True)] = (0.9, 0.95)
    weight_decay: Annotated[float, Number(0, 1e6)] = 0.1
    clip: Annotated[float, POSITIVE] = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: Annotated[int, SEED] = 0
    log_every: Annotated[int, Count()] = 10
    eval_every: Annotated[int, Count()] = 100
    eval_windows: Annotated[int, Count()] = 256
    layers_every: Annotated[int, Count()] = 100

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.batch % self.accumulation:
            raise UserError(f"`batch` {self.batch} is not a multiple of `accumulation` {self.accumulation}")
        if self.warmup >= self.steps:
            raise UserError(f"`warmup` must be shorter than `steps`, got {self.warmup} and {self.steps}")
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"`precision` must be 'fp32' or 'bf16', got {self.precision!r}")
        if len(self.betas) != 2:
            raise UserError(f"`betas` must be two numbers, got {self.betas}")

    @property
    def tokens(self) -> int:
        """Tokens trained on in the whole run."""
        return self.steps * self.batch * self.length
