"""The processes that train one model together, and how its work is shared out: DDP or FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models import blocks
from geonorm.torch_compat import allow_compilations

Result = TypeVar("Result")


class OtherRankFailedError(Exception):
    """Another rank has said what went wrong; this one has nothing to add."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One process among those that train a model.

    Attributes:
        device: of this process.
        rank: its number, from 0; world_size: how many there are.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def share(self, start: int, count: int) -> tuple[int, int]:
        """Start and size of this rank's part of ``count`` things from ``start``; a multiple of their number."""
        part = count // self.world_size
        return start + self.rank * part, part

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor on :attr:`device` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def from_main(self, value: Any) -> Any:
        """Return what rank 0 passed, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Do something on rank 0 alone and return its result on every rank; a failure ends all of them.

        Raises:
            OtherRankFailedError: on the other ranks, if it failed on rank 0.
        """
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except Exception as caught:
                error = caught
        failed, result = self.from_main((error is not None, result))
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailedError
        return result  # type: ignore[return-value]

    def concatenate(self, rows: np.ndarray) -> np.ndarray:
        """Rows of all ranks in their order; every rank passes the same number of float32 rows ``[n, length]``."""
        if self.world_size == 1:
            return rows
        mine = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).cpu().numpy()


def solo(device: torch.device) -> Ranks:
    """One process that trains by itself."""
    return Ranks(device)


@contextlib.contextmanager
def joined(parallel: str, device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or be the only one.

    Args:
        parallel: ``"none"``, ``"ddp"`` or ``"fsdp"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        UserError: ranks without a way to share the work, a way without ranks, or a device that is not there.
    """
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("`device` is cuda, but torch sees no GPU; use `device=cpu`, or a torch built for CUDA")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    if parallel == "none":
        if size > 1:
            raise UserError(f"{size} ranks were started, but `parallel` is none; give --parallel ddp or fsdp")
        yield solo(torch.device(kind))
        return
    if not launched:
        raise UserError(
            f"`parallel` is {parallel}, but no ranks were started; run torchrun --nproc-per-node N -m geonorm train ..."
        )
    local = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        if local.index >= torch.cuda.device_count():
            raise UserError(f"rank {local.index} of this machine has no GPU; start {torch.cuda.device_count()} ranks")
        torch.cuda.set_device(local)
    # Objects travel on the CPU, gradients where they are.
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    yield Ranks(local, dist.get_rank(), dist.get_world_size())
    # Not after a failure: it would wait for ranks that are gone, and the process ends anyway.
    dist.destroy_process_group()


# A reducer holds a process group, whose destructor waits, with Python's lock, for a thread that may just need that lock
# to put away the last collective: torch 2.13 hangs there now and then. So it goes with the process.
_KEPT: list[nn.Module] = []


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
            _KEPT.append(self.forward)
        # Both take the mean of gradients over ranks; a token mean needs their sum.
        self.gradient_scale = 1.0 if kind == "none" else float(ranks.world_size)

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

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _compile_blocks(model: nn.Module) -> None:
    """Compile block by block, because FSDP puts its own work between them."""
    layers = blocks(model)
    # Every block has step sizes of its own, and so code of its own.
    allow_compilations(4 * len(layers))
    for block in layers:
        block.compile()
