"""The step against its plain composition and against what Pre-Norm does: ``python -m benchmarks.step``.

Forward and backward of one connection, each implementation in turn within every round, medians and quartiles over
rounds, and the time of copying the same bytes as a floor.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import geonorm

SHAPES = ((2048, 128), (8192, 768), (1024, 4096))
ROUNDS = 15
RESULTS = Path(__file__).parent / "results" / "step.json"


def add_rms_norm(x: Tensor, u: Tensor) -> Tensor:
    """What a Pre-Norm connection does between two sub-layers."""
    return functional.rms_norm(x + u, x.shape[-1:], eps=1e-6)


def copy(x: Tensor, u: Tensor) -> Tensor:
    """The floor: the traffic of the step forward (2 reads, 1 write) and backward (3 reads, 2 writes) as copies."""
    for _ in range(4):
        x = u.clone()
    return x


CONTENDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy floor": copy,
    "add + rms_norm": add_rms_norm,
    "reference": lambda x, u: geonorm.sphere_step(x, u, 0.5, impl="reference"),
    "autograd": lambda x, u: geonorm.sphere_step(x, u, 0.5, impl="autograd"),
}


def check(x: Tensor, u: Tensor) -> None:
    """Stop before timing anything that is wrong."""
    exact = geonorm.sphere_step(x.double(), u.double(), 0.5, impl="reference")
    for impl in ("reference", "autograd"):
        torch.testing.assert_close(geonorm.sphere_step(x, u, 0.5, impl=impl).double(), exact, rtol=1e-5, atol=1e-5)


def time_once(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, u: Tensor, g: Tensor) -> float:
    """Seconds of one forward and backward; of the calls alone for the floor, which has no gradient."""
    start = time.perf_counter()
    y = function(x, u)
    if y.requires_grad:
        torch.autograd.grad(y, (x, u), g)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        x, u, g = (torch.randn(shape, generator=generator) for _ in range(3))
        check(x, u)
        x.requires_grad_()
        u.requires_grad_()
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for round_number in range(ROUNDS + 2):
            for name, function in CONTENDERS.items():
                inputs = (x.detach(), u.detach()) if name == "copy floor" else (x, u)
                seconds = time_once(function, *inputs, g)
                if round_number >= 2:
                    times[name].append(seconds)
        reference = statistics.median(times["reference"])
        for name, values in times.items():
            low, median, high = statistics.quantiles(values, n=4)
            rows.append({"shape": shape, "name": name, "ms": median * 1e3, "quartiles_ms": [low * 1e3, high * 1e3]})
            print(
                f"{shape[0]:>6} x {shape[1]:<5} {name:<16} {median * 1e3:8.2f} ms"
                f"  [{low * 1e3:.2f}, {high * 1e3:.2f}]  {median / reference:5.2f} of reference"
            )
    RESULTS.parent.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    RESULTS.write_text(json.dumps({"command": "python -m benchmarks.step", **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
