"""What a training step keeps for its backward pass, found by running the step on tensors without data.

Counting what the code really saves needs no formula for each placement, family and precision, and cannot fall behind
them. A block is the difference between two layers and one, so that the time does not grow with the depth; only where
layers differ, in a mixture or with a stream that may grow, the whole depth is run as well.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.models import blocks
from geonorm.torch_compat import storage_id, without_data
from geonorm.training.validation import autocast, token_losses


@dataclasses.dataclass(frozen=True)
class Saved:
    """Bytes that the forward pass of one micro-batch keeps.

    Attributes:
        total: of the whole model.
        block: of one layer, the last where they differ; copies of its weights in bfloat16 included where autocast makes
            and keeps them.
        rest: outside the layers: embedding, exit, head and loss.
        streams: what enters the layers, of all together; all that is kept of them where they are computed again.
    """

    total: int
    block: int
    rest: int
    streams: int


def saved_bytes(
    build: Callable[[int], nn.Module], depth: int, batch: int, length: int, precision: str, *, alike: bool = True
) -> Saved:
    """Count what one micro-batch keeps for the backward pass.

    Args:
        build: makes the model with so many layers; called on the meta device.
        depth: layers of the model that is meant.
        batch: windows; length: tokens of each.
        precision: ``"fp32"`` or ``"bf16"``.
        alike: whether every layer after the first keeps the same.
    """
    (one, first), (two, both) = (_run(build, count, batch, length, precision) for count in (1, 2))
    if alike or depth <= 2:
        block, rest = two - one, 2 * one - two
        return Saved(depth * block + rest, block, rest, first + (depth - 1) * (both - first))
    three, _ = _run(build, 3, batch, length, precision)
    before, _ = _run(build, depth - 1, batch, length, precision)
    total, streams = _run(build, depth, batch, length, precision)
    # Of a parabola: where a stream grows with each layer, what is kept grows with the square of the depth.
    return Saved(total, total - before, max(0, 3 * (one - two) + three), streams)


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


def _run(build: Callable[[int], nn.Module], depth: int, batch: int, length: int, precision: str) -> tuple[int, int]:
    """Bytes saved, and bytes of the streams that enter the layers."""
    with torch.device("meta"):
        model = build(depth)
    streams: list[int] = []
    for block in blocks(model):
        block.register_forward_pre_hook(lambda _, args: streams.append(args[0].numel() * args[0].element_size()))
    with without_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make_fake(model)
        model.train()
        saved = storages_saved(model, torch.zeros(batch, length + 1, dtype=torch.int64), precision)
    return saved, sum(streams)


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
