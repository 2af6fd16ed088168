"""What a training step keeps for its backward pass, found by running the step on tensors without data.

Counting what the code really saves needs no formula for each placement, family and precision, and cannot fall behind
them. A block is the difference between two layers and one, so that the time does not grow with the depth.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.torch_compat import storage_id, without_data
from geonorm.training.validation import autocast, token_losses


@dataclasses.dataclass(frozen=True)
class Saved:
    """Bytes that the forward pass of one micro-batch keeps.

    Attributes:
        block: of one layer, copies of its weights in bfloat16 included where autocast makes and keeps them.
        rest: outside the layers: embedding, exit, head and loss.
    """

    block: int
    rest: int


def saved_bytes(build: Callable[[int], nn.Module], batch: int, length: int, precision: str) -> Saved:
    """Count what one micro-batch keeps for the backward pass.

    Args:
        build: makes the model with so many layers; called on the meta device.
        batch: windows; length: tokens of each.
        precision: ``"fp32"`` or ``"bf16"``.
    """
    one, two = (_run(build, depth, batch, length, precision) for depth in (1, 2))
    return Saved(two - one, 2 * one - two)


def storages_saved(model: nn.Module, ids: Tensor, precision: str) -> int:
    """Bytes of distinct storages that the forward pass saves, those of parameters not counted."""
    own = {storage_id(parameter) for parameter in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}
    length = ids.shape[1] - 1

    def pack(tensor: Tensor) -> Tensor:
        # Without data transformers cannot see that nothing is masked, and makes a mask that a run does not have.
        is_mask = tensor.dim() == 4 and tensor.shape[1] == 1 and tuple(tensor.shape[2:]) == (length, length)
        if storage_id(tensor) not in own and not is_mask:
            # Held, so that no later storage gets the same address.
            found[storage_id(tensor)] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(ids.device, precision):
        losses = token_losses(model, ids)
    del losses
    return sum(size for size, _ in found.values())


def _run(build: Callable[[int], nn.Module], depth: int, batch: int, length: int, precision: str) -> int:
    with torch.device("meta"):
        model = build(depth)
    with without_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make_fake(model)
        model.train()
        return storages_saved(model, torch.zeros(batch, length + 1, dtype=torch.int64), precision)


def _make_fake(model: nn.Module) -> None:
    """Replace tensors on the meta device by such that claim to be on the CPU, where autocast works on them."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
