"""Settings of one training run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from geonorm.errors import UserError, check_count, check_positive


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

    steps: int = 500
    batch: int = 16
    accumulation: int = 1
    length: int = 128
    lr: float = 4e-3
    warmup: int = 50
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    eval_windows: int = 256
    layers_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "length", "log_every", "eval_every", "eval_windows"):
            check_count(name, getattr(self, name))
        check_count("layers_every", self.layers_every)
        check_count("warmup", self.warmup, 0)
        check_count("seed", self.seed, 0)
        check_positive("lr", self.lr)
        check_positive("clip", self.clip)
        if self.batch % self.accumulation:
            raise UserError(f"`batch` {self.batch} is not a multiple of `accumulation` {self.accumulation}")
        if self.warmup >= self.steps:
            raise UserError(f"`warmup` must be shorter than `steps`, got {self.warmup} and {self.steps}")
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"`precision` must be 'fp32' or 'bf16', got {self.precision!r}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"`min_lr_ratio` must lie in 0..1, got {self.min_lr_ratio}")
        if not self.weight_decay >= 0:
            raise UserError(f"`weight_decay` must not be negative, got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"`betas` must be two numbers in [0, 1), got {self.betas}")

    @property
    def tokens(self) -> int:
        """Tokens trained on in the whole run."""
        return self.steps * self.batch * self.length
