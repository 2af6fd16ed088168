"""AdamW or Muon, with the groups that every placement shares, and the learning rate over the run.

The rate is a function of the step alone, so that a resumed run needs no state for it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models import blocks
from geonorm.placements import Learned
from geonorm.training.config import RunConfig

Groups = list[dict[str, Any]]


class Optimizers:
    """Several optimisers, each with parameters of its own, stepped as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Groups:
        """Groups of all, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Step each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def owner(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Return the optimiser that updates a parameter."""
        for optimizer in self.optimizers:
            if any(parameter is one for group in optimizer.param_groups for one in group["params"]):
                return optimizer
        raise AssertionError("a parameter without an optimiser")


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Split trainable parameters: matrices are decayed; norm gains, biases and what a placement learns are not.

    Every trainable parameter is in exactly one group.
    """
    return _groups(model, [parameter for parameter in model.parameters() if parameter.requires_grad], weight_decay)


def _groups(model: nn.Module, parameters: list[nn.Parameter], weight_decay: float) -> Groups:
    matrices = _matrices(model)
    return [
        {"params": [p for p in parameters if id(p) in matrices], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
    ]


def _matrices(model: nn.Module) -> set[int]:
    """Parameters with two axes, by id; without those of a placement's own modules, which are no maps of features."""
    own = {id(p) for module in model.modules() if isinstance(module, Learned) for p in module.parameters()}
    return {id(p) for p in model.parameters() if p.dim() >= 2} - own


def adamw(groups: Groups, *, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> torch.optim.AdamW:
    """Make AdamW; in one kernel where all parameters are on a GPU."""
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"]) or None
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def muon_with_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    momentum: float,
    weight_decay: float,
    eps: float = 1e-8,
) -> Optimizers:
    """Muon for the matrices of the blocks, AdamW for embeddings, head, gains, biases and step sizes.

    Muon's update is scaled to the RMS of AdamW's (arXiv 2502.16982), so that one learning rate serves both.

    Raises:
        UserError: this torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"torch {torch.__version__} has no Muon; use torch 2.9 or newer, or `optimizer.name=adamw`")
    inner = {id(p) for block in blocks(model) for p in block.parameters() if p.dim() == 2} & _matrices(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if id(parameter) in inner]
    rest = [parameter for parameter in trainable if id(parameter) not in inner]
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return Optimizers(muon, adamw(_groups(model, rest, weight_decay), lr=lr, betas=betas, eps=eps))


class Factor(Protocol):
    """Part of the peak learning rate at optimiser step ``step``, counted from 0."""

    def __call__(self, step: int) -> float:
        """Return the part."""
        ...


def lr_factor(step: int, *, steps: int, warmup: int, min_ratio: float) -> float:
    """Part of the peak learning rate at optimiser step ``step`` (from 0): linear warm-up, then a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def wsd_factor(step: int, *, steps: int, warmup: int, decay: int, min_ratio: float) -> float:
    """Linear warm-up, the peak, then a line to ``min_ratio``, which the last step reaches (arXiv 2404.06395).

    Args:
        step: optimiser step, counted from 0.
        steps: of the whole run; warmup: first ones; decay: last ones. Longer runs share all steps before the decay.
        min_ratio: part of the peak at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = step + 1 - (steps - decay)
    return 1.0 if done <= 0 else 1 - (1 - min_ratio) * min(1.0, done / decay)


class Schedule:
    """Sets the rate of an optimiser's groups before each step; every group follows its own peak."""

    def __init__(self, optimizer: Any, factor: Factor) -> None:
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.peaks: list[float] = [group["lr"] for group in self.groups]
        self.factor = factor

    def apply(self, step: int) -> float:
        """Set the rates for optimiser step ``step``, counted from 0; returns that of the first group."""
        part = self.factor(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * part
        return self.groups[0]["lr"]


def make_optimizer(model: nn.Module, config: RunConfig) -> tuple[Optimizers, Schedule]:
    """Make the optimiser and the schedule; after the model was cut over ranks, if it is."""
    chosen, schedule = config.optimizer, config.schedule
    same = {"lr": chosen.lr, "betas": chosen.betas, "eps": chosen.eps}
    if chosen.name == "muon":
        optimizer = muon_with_adamw(model, momentum=chosen.momentum, weight_decay=chosen.weight_decay, **same)
    else:
        optimizer = Optimizers(adamw(parameter_groups(model, chosen.weight_decay), **same))
    lengths = {"steps": config.steps, "warmup": config.warmup_steps, "min_ratio": schedule.min_lr_ratio}
    if schedule.name == "wsd":
        return optimizer, Schedule(optimizer, functools.partial(wsd_factor, decay=config.decay_steps, **lengths))
    return optimizer, Schedule(optimizer, functools.partial(lr_factor, **lengths))
