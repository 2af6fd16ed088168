"""The step against its plain composition and against what Pre-Norm does: ``python -m benchmarks.step [threads]``.

Forward and backward of one connection, each implementation in turn within every round, and the time of copying the
same bytes as a limit. With one thread this is processor time, which other programs on the machine disturb less than
the time on the wall; with more it is the latter. The C++ kernels take part where they have been built
(``geonorm.ops.build_cpu()``).
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import geonorm
from geonorm.ops.cpp import why_not_cpp

SHAPES = ((8192, 768), (2048, 768), (16384, 256), (1024, 4096))
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 15
RESULTS = Path(__file__).parent / "results"


def add_rms_norm(x: Tensor, u: Tensor) -> Tensor:
    """What a Pre-Norm connection does between two sub-layers."""
    return functional.rms_norm(x + u, x.shape[-1:], eps=1e-6)


def copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """The limit: the bytes of the step forward (2 reads, 1 write) and backward (3 reads, 2 writes), by ``copy_``."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def step(impl: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, u: geonorm.sphere_step(x, u, 0.5, impl=impl)


def contenders() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    impls = ["reference", "autograd"] + (["cpp"] if why_not_cpp() is None else [])
    named: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add + rms_norm": add_rms_norm}
    for impl in impls:
        named[impl] = step(impl)
        named[f"{impl}, compiled"] = torch.compile(step(impl), fullgraph=True, dynamic=False)
    return named


def check(x: Tensor, u: Tensor, functions: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
    """Stop before timing anything that is wrong."""
    exact = geonorm.sphere_step(x.double(), u.double(), 0.5, impl="reference")
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    for name, function in functions.items():
        if name != "add + rms_norm":
            torch.testing.assert_close(function(x, u).double(), exact, rtol=tolerance, atol=tolerance)


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_all(shape: tuple[int, int], dtype: torch.dtype) -> list[dict]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, u, g, more = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    sources, targets = [x, u, g, more], [torch.empty_like(x) for _ in range(4)]
    leaves = x.clone().requires_grad_(), u.clone().requires_grad_()
    functions = contenders()
    check(x, u, functions)
    times: dict[str, list[float]] = {"copy limit": [], **{name: [] for name in functions}}
    for round_number in range(ROUNDS + 2):
        start = clock()
        copy(sources, targets)
        spent = {"copy limit": clock() - start}
        for name, function in functions.items():
            start = clock()
            torch.autograd.grad(function(*leaves), leaves, g)
            spent[name] = clock() - start
        if round_number >= 2:
            for name, seconds in spent.items():
                times[name].append(seconds)
    rows = []
    limit, plain = min(times["copy limit"]), min(times["reference"])
    for name, values in times.items():
        low, median, high = (1e3 * value for value in statistics.quantiles(values, n=4))
        least = 1e3 * min(values)
        of_copy, of_plain = least / limit / 1e3, least / plain / 1e3
        kind = str(dtype).removeprefix("torch.")
        rows.append({
            "shape": shape, "dtype": kind, "name": name, "min_ms": least, "median_ms": median,
            "quartiles_ms": [low, high], "of_copy": of_copy, "of_reference": of_plain,
        })  # fmt: skip
        print(
            f"{shape[0]:>6} x {shape[1]:<5} {kind:<9} {name:<20} least {least:7.2f} ms  median {median:7.2f} "
            f"[{low:.2f}, {high:.2f}]  {of_copy:6.2f} of copy {of_plain:6.2f} of reference",
            flush=True,
        )
    return rows


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    rows = [row for shape in SHAPES for dtype in DTYPES for row in time_all(shape, dtype)]
    RESULTS.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": threads}
    content = {"command": f"python -m benchmarks.step {threads}", **versions, "rows": rows}
    name = "step.json" if threads == 1 else f"step-{threads}-threads.json"
    (RESULTS / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
