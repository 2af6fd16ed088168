"""AdamW with the groups and the schedule that every placement shares."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from geonorm.training.settings import TrainSettings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split trainable parameters: matrices are decayed; norm gains, biases and step sizes are not.

    Every trainable parameter is in exactly one group.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def lr_factor(step: int, *, steps: int, warmup: int, min_ratio: float) -> float:
    """Part of the peak learning rate at optimiser step ``step`` (from 0): linear warm-up, then a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model: nn.Module, settings: TrainSettings) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Make AdamW and its schedule for a model."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), lr=settings.lr, betas=settings.betas, eps=1e-8
    )
    factor = functools.partial(lr_factor, steps=settings.steps, warmup=settings.warmup, min_ratio=settings.min_lr_ratio)
    return optimizer, LambdaLR(optimizer, factor)
