"""One model over several ranks: DDP or FSDP2 around the rewired blocks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.models import blocks
from geonorm.training.ranks import Ranks


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is cut over ranks."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor in full; every rank has to ask for one that is cut over them."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


class Parallel:
    """How a model's forward and backward passes run over ranks.

    Attributes:
        model: the model itself: parameters by their own names, whole or cut over the ranks.
        forward: what a training step calls, with the arguments of the model.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, kind: str = "none", *, compiled: bool = False) -> None:
        """Prepare a model for training, in place.

        Args:
            model: on its device, with the same weights on every rank.
            ranks: the processes.
            kind: ``"none"``, ``"ddp"`` or ``"fsdp"``.
            compiled: compile the forward and backward passes of training.
        """
        self.model, self.kind = model, kind
        if kind == "fsdp":
            if compiled:
                _compile_blocks(model)
            _shard(model, ranks)
        # Evaluation and sampling, whose inputs have many shapes, go by the model itself, which is not compiled.
        self.forward: Any = torch.compile(model) if compiled and kind != "fsdp" else model
        if kind == "ddp":
            where = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.forward = nn.parallel.DistributedDataParallel(
                self.forward, device_ids=where, gradient_as_bucket_view=True
            )
        # Both take the mean of gradients over ranks; a token mean needs their sum.
        self.gradient_scale = 1.0 if kind == "none" else float(ranks.size)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Any:
        """Around the forward and backward of one micro-batch: gradients travel with the last alone."""
        if self.kind == "ddp" and not last:
            with self.forward.no_sync():
                yield
            return
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield


def recompute_blocks(model: Any) -> None:
    """Have each block computed again in the backward pass, instead of keeping what that needs."""
    # Two names for it, the older on its way out.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False})


def _shard(model: nn.Module, ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _compile_blocks(model: nn.Module) -> None:
    """Compile block by block, because FSDP puts its own work between them."""
    layers = blocks(model)
    # Every block has step sizes of its own, and so code of its own.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    for block in layers:
        block.compile()
