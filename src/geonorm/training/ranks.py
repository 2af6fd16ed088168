"""The processes that train one model together, and what they say to each other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from geonorm.errors import UserError

Result = TypeVar("Result")


class OtherRankFailedError(Exception):
    """Another rank has said what went wrong; this one has nothing to add."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One process among those that train a model.

    Attributes:
        device: of this process.
        rank: its number, from 0; size: how many there are.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def share(self, start: int, count: int) -> tuple[int, int]:
        """Start and size of this rank's part of ``count`` things from ``start``; ``count`` is a multiple of size."""
        part = count // self.size
        return start + self.rank * part, part

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor on :attr:`device` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def from_main(self, value: Any) -> Any:
        """Return what rank 0 passed, on every rank."""
        if self.size == 1:
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
        if self.size == 1:
            return rows
        mine = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
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
