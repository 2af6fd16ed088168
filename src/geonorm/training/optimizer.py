"""AdamW or Muon, with the groups that every placement shares."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models import blocks
from geonorm.training.schedule import Schedule, lr_factor
from geonorm.training.settings import TrainSettings

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
    """Split trainable parameters: matrices are decayed; norm gains, biases and step sizes are not.

    Every trainable parameter is in exactly one group.
    """
    return _groups([parameter for parameter in model.parameters() if parameter.requires_grad], weight_decay)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> Groups:
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


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
    inner = {id(p) for block in blocks(model) for p in block.parameters() if p.requires_grad and p.dim() == 2}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if id(parameter) in inner]
    rest = [parameter for parameter in trainable if id(parameter) not in inner]
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return Optimizers(muon, adamw(_groups(rest, weight_decay), lr=lr, betas=betas, eps=eps))


def make_optimizer(model: nn.Module, settings: TrainSettings) -> tuple[Optimizers, Schedule]:
    """Make the AdamW and the cosine of a controlled comparison."""
    optimizer = Optimizers(adamw(parameter_groups(model, settings.weight_decay), lr=settings.lr, betas=settings.betas))
    factor = functools.partial(lr_factor, steps=settings.steps, warmup=settings.warmup, min_ratio=settings.min_lr_ratio)
    return optimizer, Schedule(optimizer, factor)
