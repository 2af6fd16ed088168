"""Run by torchrun on two ranks: the step in a network under DDP and FSDP2; prints the largest error of a gradient."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from geonorm import sphere_step


class Net(nn.Module):
    def __init__(self, impl: str) -> None:
        super().__init__()
        self.impl = impl
        self.layer = nn.Linear(8, 8)
        self.alpha = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sphere_step(x, self.layer(x), self.alpha, max_angle=0.9, radius=2.0, impl=self.impl)


def gradients(net: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    (net(tokens) * torch.arange(8.0)).mean().backward()
    return [
        value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad for value in net.parameters()
    ]


def main() -> None:
    dist.init_process_group("gloo")
    rank, errors = dist.get_rank(), {}
    for impl in sys.argv[1:]:
        for wrap in (DistributedDataParallel, fully_shard):
            torch.manual_seed(0)
            net, alone, tokens = Net(impl), Net(impl), torch.randn(6, 8)
            alone.load_state_dict(net.state_dict())
            net = wrap(net)
            got = gradients(net, tokens[rank::2])
            want = gradients(alone, tokens)
            worst = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(got, want, strict=True))
            errors[f"{impl} {wrap.__name__}"] = worst
    if rank == 0:
        print(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
