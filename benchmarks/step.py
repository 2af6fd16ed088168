"""The step against the limit of copying memory and against add + RMSNorm: ``python -m benchmarks.step``.

Every implementation that ``geonorm.ops`` lists and that runs here, forward and backward. The limit is the time that
copying takes for the bytes that the step must move, measured in the same rounds: forward 2 reads and 1 write, backward
3 reads and 2 writes of tokens x width. Add + RMSNorm, what Pre-Norm does between two sub-layers, returns the sum and
the norm, and must move as much. ``of_peak`` is the same traffic at the measured peak of copying over the time taken; it
can pass 1 where tensors stay in a CPU's cache.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import (
    DTYPES,
    Budget,
    Settings,
    Timer,
    command_line,
    fill,
    header,
    peak_copy,
    ratio,
    report,
    spread,
    take_turns,
)
from benchmarks.norms import add_rms_norm
from geonorm import geometry
from geonorm.errors import UserError
from geonorm.ops import IMPLEMENTATIONS, sphere_step, which
from geonorm.ops.availability import interpreting

ALPHA, MAX_ANGLE = 0.3, math.pi / 4
STEP, NORM = "step", "add + rms_norm"
# Reads and writes of one tensor, forward and backward, that cannot be avoided.
TRAFFIC = {STEP: (3, 5), NORM: (4, 4)}
CHECKED_ROWS = 1024
PEAK_SIZES = {"cpu": 2**27, "cuda": 2**31, "quick": 2**20}
Function = Callable[[Tensor, Tensor, Tensor], "tuple[Tensor, ...]"]


@dataclasses.dataclass(frozen=True)
class StepSettings(Settings):
    """The step alone."""

    shapes: tuple[tuple[int, int], ...] | None = None
    """Tokens and width of each case."""
    compiled_shapes: tuple[tuple[int, int], ...] | None = None
    """The shapes for which compiled contenders run too: compiling takes seconds for each."""
    dtypes: tuple[str, ...] | None = None
    """float32, bfloat16 or float16."""


PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "shapes": ((1024, 256), (8192, 768), (1024, 8192), (65536, 256)),
        "compiled_shapes": ((8192, 768), (65536, 256)),
        "dtypes": ("float32", "bfloat16"),
        "rounds": 9,
    },
    "cuda": {
        "shapes": tuple((tokens, width) for tokens in (1024, 8192, 65536) for width in (256, 1024, 4096, 8192)),
        "compiled_shapes": ((8192, 1024), (65536, 1024), (8192, 8192)),
        "dtypes": ("float32", "bfloat16"),
        "rounds": 20,
    },
    "quick": {
        "shapes": ((8, 64),),
        "compiled_shapes": (),
        "dtypes": ("float32", "bfloat16"),
        "rounds": 3,
    },
}


def torch_add_rms_norm(x: Tensor, u: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Sum and norm with PyTorch's own functions."""
    total = x + u
    return total, functional.rms_norm(total, total.shape[-1:], weight, 1e-6)


def contenders(device: str, compiled: bool) -> dict[str, tuple[str, Function]]:
    """Name to kind and function; which of them runs is found out by the check."""
    every: dict[str, tuple[str, Function]] = {}
    for impl in IMPLEMENTATIONS:
        every[impl] = (STEP, lambda x, u, _, impl=impl: (step(x, u, impl),))
    every["torch"] = (NORM, torch_add_rms_norm)
    if device == "cuda":
        every["triton norm"] = (NORM, lambda x, u, weight: add_rms_norm(x, u, weight, impl="triton"))
        if importlib.util.find_spec("liger_kernel") is not None:
            every["liger"] = (NORM, liger)
    if importlib.util.find_spec("geoopt") is not None:
        every["geoopt"] = (STEP, geoopt_step())
    if compiled:
        chosen = which(torch.empty(1, 1, device=device))
        every[f"{chosen}, compiled"] = (STEP, torch.compile(lambda x, u, _: (step(x, u, chosen),), dynamic=False))
        for impl in ("autograd", "reference"):
            if impl != chosen:
                every[f"{impl}, compiled"] = (
                    STEP,
                    torch.compile(lambda x, u, _, impl=impl: (step(x, u, impl),), dynamic=False),
                )
        every["torch, compiled"] = (NORM, torch.compile(torch_add_rms_norm, dynamic=False))
    return every


def step(x: Tensor, u: Tensor, impl: str) -> Tensor:
    """The step as the placement takes it, but for the radius, which geoopt cannot name."""
    return sphere_step(x, u, ALPHA, max_angle=MAX_ANGLE, impl=impl)


def liger(x: Tensor, u: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Liger-Kernel's fused operation; it returns the norm first."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    normed, total = LigerFusedAddRMSNormFunction.apply(x, u, weight, 1e-6)
    return total, normed


def geoopt_step() -> Function:
    """geoopt's tangent projection and exponential map, which know unit rows and no limit of the angle."""
    import geoopt

    sphere = geoopt.Sphere()
    return lambda x, u, _: (sphere.expmap(x, sphere.proju(x, ALPHA * u)),)


def leaves(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Point, update, gain and gradient; the update is small enough that no angle is clamped."""
    generator = torch.Generator(device).manual_seed(0)
    x, u, g = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    weight = torch.ones(shape[1], device=device, dtype=dtype).requires_grad_()
    return x.requires_grad_(), u.requires_grad_(), weight, g


def run_once(kind: str, function: Function, inputs: tuple[Tensor, ...], g: Tensor, timer: Timer) -> tuple[float, float]:
    """Seconds forward and backward."""
    forward, outputs = timer(lambda: function(*inputs))
    wanted = inputs if kind == NORM else inputs[:2]
    backward, _ = timer(lambda: torch.autograd.grad(outputs, wanted, [g] * len(outputs)))
    return forward, backward


def check(
    kind: str, function: Function, x: Tensor, u: Tensor, weight: Tensor, g: Tensor, on_sphere: bool = False
) -> str | None:
    """Why the contender cannot run here, or None; values and gradients must agree with float64.

    ``on_sphere``: the function is defined for unit rows alone, so only tangent parts of the gradient by x can agree.

    Raises:
        AssertionError: they do not, so that nothing wrong is timed.
    """
    try:
        outputs = function(x, u, weight)
        grads = torch.autograd.grad(outputs, (x, u), [g] * len(outputs))
    except (UserError, KeyError, torch.OutOfMemoryError) as error:
        said = f"knows no {x.dtype}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        return said.splitlines()[0][:200]
    rows = slice(0, CHECKED_ROWS)
    wide = [value.detach()[rows].double().requires_grad_() for value in (x, u)]
    exact = torch_add_rms_norm(*wide, weight.double()) if kind == NORM else (step(*wide, "reference"),)
    exact_grads = torch.autograd.grad(exact, wide, [g[rows].double()] * len(exact))
    allowed = 8 * torch.finfo(torch.float32).eps * math.sqrt(x.shape[1]) + 2 * torch.finfo(x.dtype).eps
    # Pre-Norm's norm reads the sum that was rounded, and its composition rounds in between.
    allowed *= 4 if kind == NORM else 1
    got = [value.detach()[rows].double() for value in (*outputs, *grads)]
    want = [value.detach() for value in (*exact, *exact_grads)]
    if on_sphere:
        got[-2], want[-2] = (geometry.tangent(wide[0].detach(), value) for value in (got[-2], want[-2]))
    for value, right in zip(got, want, strict=True):
        error = float(((value - right).abs().amax(-1) / right.abs().amax(-1)).max())
        assert error <= allowed, f"{kind} {tuple(x.shape)} {x.dtype}: error {error:.3g}, allowed {allowed:.3g}"
    return None


def run_case(
    shape: tuple[int, int], dtype: torch.dtype, settings: StepSettings, timer: Timer, peak: float, budget: Budget
) -> list[dict[str, Any]]:
    """Rows of one shape and dtype, the copy first."""
    torch.compiler.reset()
    x, u, weight, g = leaves(shape, dtype, settings.device)
    on_sphere = tuple((value.detach() / x.detach().norm(dim=-1, keepdim=True)).requires_grad_() for value in (x, u))
    names, rows = contenders(settings.device, shape in (settings.compiled_shapes or ())), []
    turns: dict[str, Callable[[], Any]] = {}
    target = torch.empty_like(g)
    turns["copy"] = lambda: (timer(lambda: target.copy_(g))[0], 0.0)
    case = {"tokens": shape[0], "width": shape[1], "dtype": str(dtype).removeprefix("torch.")}
    for name, (kind, function) in names.items():
        inputs = (*(on_sphere if name == "geoopt" else (x, u)), weight)
        if name == "triton" and interpreting() and settings.device == "cpu":
            reason = "triton is interpreted here; its time would mean nothing"
        else:
            reason = check(kind, function, *inputs, g, on_sphere=name == "geoopt")
        if reason is not None:
            rows.append({**case, "name": name, "kind": kind, "skipped": reason})
            continue
        turns[name] = lambda kind=kind, function=function, inputs=inputs: run_once(kind, function, inputs, g, timer)
    assert settings.rounds is not None
    times = take_turns(turns, settings.rounds, budget=budget)
    copy = [forward for forward, _ in times.pop("copy")]
    speed = 2 * g.nbytes / spread(copy)["median"]
    done = [{**case, "name": "copy", "kind": "limit", "ms": scaled(copy), "of_peak": speed / peak}]
    norm = [sum(pair) for pair in times["torch"]] if "torch" in times else None
    for name, pairs in times.items():
        kind = names[name][0]
        both = [sum(pair) for pair in pairs]
        row: dict[str, Any] = {**case, "name": name, "kind": kind, "ms": scaled(both)}
        for index, phase in enumerate(("forward", "backward")):
            # A copy is one read and one write.
            limit = [value * TRAFFIC[kind][index] / 2 for value in copy]
            row[f"{phase}_over_copy"] = ratio([pair[index] for pair in pairs], limit)
        row["over_copy"] = ratio(both, [value * sum(TRAFFIC[kind]) / 2 for value in copy])
        row["of_peak"] = sum(TRAFFIC[kind]) * g.nbytes / spread(both)["median"] / peak
        if norm is not None:
            row["over_torch_norm"] = ratio(both, norm)
        done.append(row)
    return done + rows


def scaled(seconds: list[float]) -> dict[str, Any]:
    return spread([value * 1e3 for value in seconds])


def run(settings: StepSettings) -> dict[str, Any]:
    """Every case in turn; returns and writes the result."""
    settings = fill(settings, PRESETS)
    budget, timer, rows = Budget(settings.seconds), Timer(settings), []
    result, left_out = header("step", settings), []
    peak = peak_copy(timer, PEAK_SIZES["quick" if settings.quick else settings.device])
    for dtype in settings.dtypes or ():
        if dtype not in DTYPES:
            raise UserError(f"`dtypes` must be of {', '.join(DTYPES)}, got {dtype!r}")
    for shape in settings.shapes or ():
        for dtype in settings.dtypes or ():
            if budget.left <= 0:
                left_out.append([*shape, dtype])
                continue
            rows += run_case(shape, DTYPES[dtype], settings, timer, peak, budget)
            if settings.device == "cuda":
                torch.cuda.empty_cache()
    result |= {"peak_copy_GB_s": peak / 1e9, "rows": rows, "left_out_for_time": left_out, "seconds": budget.used}
    shown = ("tokens", "width", "dtype", "kind", "name", "ms", "forward_over_copy", "backward_over_copy", "over_copy",
             "of_peak", "over_torch_norm")  # fmt: skip
    timed = [{key: row.get(key) for key in shown} for row in rows if "ms" in row]
    skipped = {(row["name"], row["dtype"]): row["skipped"] for row in rows if "skipped" in row}
    why = [{"name": name, "dtype": dtype, "why": reason} for (name, dtype), reason in skipped.items()]
    report(
        "step",
        settings,
        result,
        {f"The step, forward + backward; peak of copying {peak / 1e9:.1f} GB/s": timed, "Not run": why},
    )
    return result


if __name__ == "__main__":
    command_line(StepSettings, run, __doc__)
