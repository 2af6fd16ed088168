"""Norms without the rounding to float32 that those of transformers have inside, for identities in float64."""

from __future__ import annotations

import torch


def _exact(unit_gain):
    def forward(self, h):
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        unit = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        return unit * (self.weight + (1 - unit_gain))

    return forward


def make_exact(monkeypatch, model, unit_gain: float = 1.0) -> None:
    """Replace the forward of every RMSNorm class in a model until the test ends."""
    for kind in {type(module) for module in model.modules() if "RMSNorm" in type(module).__name__}:
        monkeypatch.setattr(kind, "forward", _exact(unit_gain))
