"""Norms that a placement can ask for in the place of the model's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from geonorm.placements.connection import Learned


class RMSNorm(nn.RMSNorm, Learned):
    """torch's RMSNorm with a gain, eps 1e-6."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)

    def initial_value(self, name: str) -> float:
        """Gain 1."""
        return 1.0


class LayerNorm(nn.LayerNorm, Learned):
    """torch's LayerNorm with a gain and a bias, eps 1e-5."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def initial_value(self, name: str) -> float:
        """Gain 1, bias 0."""
        return float(name == "weight")


class DyT(Learned):
    """Dynamic tanh: ``weight * tanh(alpha x) + bias``, alpha one number from 0.5 (arXiv 2503.10622, equation 1).

    No norm: the size of a row stays in what it returns. ``[..., d]`` to ``[..., d]``.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def initial_value(self, name: str) -> float:
        """Alpha 0.5, gain 1, bias 0."""
        return {"alpha": 0.5, "weight": 1.0, "bias": 0.0}[name]

    def forward(self, x: Tensor) -> Tensor:
        """Squash every entry."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


NORM_KINDS: dict[str, type[Learned]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm, "dyt": DyT}
