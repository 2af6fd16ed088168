"""Weights that a placement keeps at length 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from geonorm.models.adapter import adapter_for, config_placement, is_rewired


@torch.no_grad()
def normalize_weights(model: nn.Module) -> None:
    """Bring every weight that the placement keeps at length 1 back to it, in place; no other placement changes.

    To be called after each step of the optimiser, which geonorm's own loop does; in another one, for instance
    ``optimizer.register_step_post_hook(lambda *_: normalize_weights(model))``. The norm is taken in float32 at least
    and a zero row stays zero.

    Raises:
        UserError: unsupported class.
    """
    if not is_rewired(model):
        return
    config: Any = model.config
    axes, adapter = config_placement(config).weight_axes, adapter_for(model)
    if not axes:
        return
    for name, parameter in model.named_parameters():
        for part in adapter.views(name, parameter, config) or []:
            if part.role in axes:
                weight = part.view
                dim = axes[part.role] if not part.transposed else 1 - axes[part.role]
                # A view of interleaved heads has an axis more before that of its inputs.
                dim = dim if dim == 0 else -1
                wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
                length = wide.square().sum(dim, keepdim=True).sqrt()
                weight.copy_(wide / torch.where(length > 0, length, 1.0))
