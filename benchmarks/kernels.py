"""Correctness of the kernels where they run, before anything is timed: ``python -m benchmarks.kernels``.

Values and gradients of the Triton kernels against float64 on the same device: every retraction and dtype, narrow and
wide rows, limits, radii, strided rows, rows beyond 32-bit offsets. Every error is given over what is allowed, so 1 is
the limit. Without a GPU the kernels run interpreted where TRITON_INTERPRET=1 is set; else the analytic function stands
in, which tries this script and says nothing about the kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import DTYPES, Budget, Settings, command_line, fill, header, report
from benchmarks.norms import add_rms_norm, scaled_add_rms_norm
from geonorm.geometry import RETRACTIONS
from geonorm.ops import sphere_step
from geonorm.ops.availability import why_not_triton

ALPHA = 0.8
FAR_ROWS, FAR_WIDTH = 2**23 + 16, 256


@dataclasses.dataclass(frozen=True)
class KernelSettings(Settings):
    """Correctness of the kernels."""

    widths: tuple[int, ...] | None = None
    """Widths of the rows; they take turns, since each makes the compiler work anew."""


PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"widths": (7, 256, 1000), "rounds": 1},
    "cuda": {"widths": (256, 1000, 4096, 7, 20000), "rounds": 1},
    "quick": {"widths": (7, 64), "rounds": 1},
}


def over_allowed(value: Tensor, exact: Tensor, arithmetic: torch.dtype = torch.float32) -> float:
    """Largest error over what is allowed: 4 eps sqrt(d) of the row for the arithmetic, and a spacing of the dtype."""
    value, dtype, exact = value.detach().double(), value.dtype, exact.detach()
    eps, finest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    spacing = eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(finest))))
    row = exact.abs().amax(-1, keepdim=True).clamp_min(exact.square().mean().sqrt())
    noise = 4 * torch.finfo(arithmetic).eps * math.sqrt(exact.shape[-1]) * row
    error = (value - exact).abs() / (spacing + noise)
    return math.inf if bool(error.isnan().any()) else float(error.max())


def rows(count: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    value = torch.randn(count, width, generator=generator, device=device)
    # Narrow rows near zero make every quotient ill-conditioned.
    return (value.sign() * (value.abs() + 0.5)).to(dtype)


def step_error(x: Tensor, u: Tensor, g: Tensor, impl: str, **options: Any) -> float:
    """Worst of y, both gradients and that of alpha."""
    results = []
    for values, used in (((x, u, g), impl), ((x.double(), u.double(), g.double()), "reference")):
        a, b = (value.detach().requires_grad_() for value in values[:2])
        alpha = torch.tensor([ALPHA], device=x.device, dtype=torch.promote_types(a.dtype, torch.float32))
        y = sphere_step(a, b, alpha.requires_grad_(), impl=used, **options)
        results.append((y, *torch.autograd.grad(y, (a, b, alpha), values[2])))
    errors = [over_allowed(value, exact) for value, exact in zip(results[0][:3], results[1][:3], strict=True)]
    terms = float((g.double().norm(dim=-1) * u.double().norm(dim=-1)).sum())
    allowed = 8 * torch.finfo(torch.float32).eps * math.sqrt(x.shape[-1]) * terms
    by_alpha = float((results[0][3].double() - results[1][3]).abs()) / allowed
    return max(*errors, by_alpha)


def norm_error(x: Tensor, u: Tensor, g: Tensor, impl: str, scaled: bool) -> float:
    """Worst of the outputs and the gradients of one of the fused norms."""
    results = []
    for values, used in (((x, u, g), impl), ((x.double(), u.double(), g.double()), "reference")):
        a, b = (value.detach().requires_grad_() for value in values[:2])
        gain = torch.linspace(0.5, 1.5, x.shape[-1], device=x.device).to(x.dtype)
        weight = gain.to(a.dtype).requires_grad_()
        if scaled:
            outputs = (scaled_add_rms_norm(a, b, weight, alpha=ALPHA, impl=used),)
        elif used == "reference":
            # The norm that is asked for is that of the sum as it was stored.
            total = a + b
            stored = total + (results[0][0].double() - total).detach()
            outputs = total, functional.rms_norm(stored, total.shape[-1:], weight, 1e-6)
        else:
            outputs = add_rms_norm(a, b, weight, impl=used)
        grads = torch.autograd.grad(outputs, (a, b, weight), [values[2]] * len(outputs))
        results.append((*outputs, *grads))
    # Where no kernel runs, PyTorch's composition rounds in between and adds gradients in the narrow dtype.
    arithmetic = torch.float32 if impl == "triton" else x.dtype
    pairs = list(zip(*results, strict=True))
    errors = [over_allowed(value, exact, arithmetic) for value, exact in pairs[:-1]]
    by_weight, exact = pairs[-1]
    allowed = (0.01 if x.dtype != torch.float32 else 1e-5) * float(exact.abs().max())
    return max(*errors, float((by_weight.double() - exact).abs().max()) / allowed)


def far_error(impl: str, device: str) -> float:
    """Forward and backward of a tensor whose last row lies beyond 2^31 entries, all other rows zero."""
    x = torch.zeros(FAR_ROWS, FAR_WIDTH, dtype=torch.bfloat16, device=device)
    x[-1] = 1
    row = torch.linspace(-1, 2, FAR_WIDTH, device=device).to(x.dtype)
    x.requires_grad_()
    update = row.detach().clone().requires_grad_()
    y = sphere_step(x, update.expand_as(x), ALPHA, impl=impl)
    if bool(y[:-1].any()):
        return math.inf
    (grad,) = torch.autograd.grad(y, x, row.expand_as(x))
    if bool(grad[:-1].any()):
        return math.inf
    last, wide = x.detach()[-1:].double().requires_grad_(), row[None].double()
    exact = sphere_step(last, wide, ALPHA, impl="reference")
    (exact_grad,) = torch.autograd.grad(exact, last, wide)
    return max(over_allowed(y[-1:], exact), over_allowed(grad[-1:], exact_grad))


def cases(settings: KernelSettings, impl: str) -> Iterator[tuple[str, Any]]:
    """Names and what measures each; the rare options take turns over the products that must all be seen."""
    device, widths = settings.device, itertools.cycle(settings.widths or ())
    limits = itertools.cycle(((None, None), (0.5, 3.0), (0.5, None), (None, 3.0)))
    if device == "cuda":
        # First, because the reference would fill the memory later on.
        free = torch.cuda.mem_get_info()[0]
        if free > 5 * 2 * FAR_ROWS * FAR_WIDTH:
            yield f"step, last of {FAR_ROWS} rows", lambda: far_error(impl, device)
    for dtype, retraction in itertools.product(DTYPES.values(), (*RETRACTIONS, 3.0)):
        for width in (next(widths), next(widths)):
            max_angle, radius = next(limits)
            options = {"retraction": retraction, "max_angle": max_angle, "radius": radius}
            x, u, g = (rows(33, width, dtype, device, seed) for seed in range(3))
            name = f"step {retraction} {str(dtype)[6:]} width {width}, max_angle {max_angle}, radius {radius}"
            yield name, lambda x=x, u=u, g=g, options=options: step_error(x, u, g, impl, **options)
    x, u, g = (rows(40, 512, torch.bfloat16, device, seed) for seed in range(3))
    yield "step, part of wider rows", lambda: step_error(x[:, :256], u[:, 256:], g[:, 100:356], impl)
    yield "step, every second row", lambda: step_error(x[::2], u[1::2], g[::2], impl)
    yield "step, transposed", lambda: step_error(x[:, :40].T, u[:, :40].T, g[:, :40].T, impl)
    norm_impl = impl if impl == "triton" else "auto"
    for dtype, scaled in itertools.product(DTYPES.values(), (False, True)):
        width = next(widths)
        x, u, g = (rows(33, width, dtype, device, seed) for seed in range(3))
        name = f"{'scaled ' if scaled else ''}add + RMSNorm {str(dtype)[6:]} width {width}"
        yield name, lambda x=x, u=u, g=g, scaled=scaled: norm_error(x, u, g, norm_impl, scaled)


def run(settings: KernelSettings) -> dict[str, Any]:
    """Every case; ends with code 1 if one is wrong."""
    settings = fill(settings, PRESETS)
    budget, result = Budget(settings.seconds), header("kernels", settings)
    impl = "triton" if why_not_triton(torch.device(settings.device), torch.float32) is None else "autograd"
    done, left_out = [], 0
    for name, measure in cases(settings, impl):
        if budget.left <= 0:
            left_out += 1
            continue
        done.append({"case": name, "impl": impl, "error_over_allowed": measure()})
    wrong = [row for row in done if not row["error_over_allowed"] <= 1]
    result |= {"impl": impl, "rows": done, "wrong": len(wrong), "left_out_for_time": left_out, "seconds": budget.used}
    report("kernels", settings, result, {f"Errors of {impl} against float64": done})
    print(f"{len(done)} cases, {len(wrong)} wrong, {left_out} left out for time")
    if wrong:
        raise SystemExit(1)
    return result


if __name__ == "__main__":
    command_line(KernelSettings, run, __doc__)
