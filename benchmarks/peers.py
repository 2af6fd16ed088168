"""Tokens a second and peak memory against other libraries' models of one shape: ``python -m benchmarks.peers``.

Each contender runs in a process of its own, so that the peak is its own; the processes take turns, twice. The same
width, depth, heads, MLP width, vocabulary and positions for all, AdamW for all. The models are what their libraries
make of these sizes, not the same model: parameters are reported.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Budget, clock, command_line, fill, header, ratio, report, spread
from benchmarks.model import HEAD, SIZES, STOCK, ModelSettings, Shape, adamw, build, loss_of, make_batch, shape_of
from geonorm.errors import UserError
from geonorm.training.validation import autocast

Loss = Callable[[Tensor], Tensor]
STEPS_TO_WARM_UP = 2


def llama(name: str) -> Callable[[Shape, str], tuple[nn.Module, Loss]]:
    """transformers' Llama, stock or rewired."""

    def make(shape: Shape, device: str) -> tuple[nn.Module, Loss]:
        model = build(name, shape, device)
        return model, lambda ids: loss_of(model, ids[:, :-1], shape.precision)

    return make


def x_transformers(shape: Shape, device: str) -> tuple[nn.Module, Loss]:
    """x-transformers' decoder with what makes it a Llama: RMSNorm, rotary positions, gated SiLU, no biases."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
    from x_transformers.x_transformers import GLU

    decoder = Decoder(
        dim=shape.width,
        depth=shape.layers,
        heads=shape.width // HEAD,
        attn_dim_head=HEAD,
        attn_flash=True,
        # With one head it would leave the output projection out.
        attn_project_out=True,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.mlp / shape.width,
    )
    for module in decoder.modules():
        if isinstance(module, GLU):
            # `ff_no_bias` reaches the second product of a gated MLP only.
            module.proj.bias = None
    net = TransformerWrapper(
        num_tokens=shape.vocab, max_seq_len=shape.tokens, attn_layers=decoder, use_abs_pos_emb=False
    )
    model = AutoregressiveWrapper(net).to(device)
    return model, model


def ngpt(shape: Shape, device: str) -> tuple[nn.Module, Loss]:
    """nGPT-pytorch, its weights normalised after each step as its paper does, which is the faster of its two ways."""
    ngpt_file = importlib.import_module("nGPT_pytorch.nGPT")

    for kind in vars(ngpt_file).values():
        # As published (0.2.16) its classes define equality without a hash, and so `parameters()` raises.
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__hash__ is None:
            kind.__hash__ = nn.Module.__hash__  # type: ignore[method-assign]
    model = ngpt_file.nGPT(
        num_tokens=shape.vocab,
        dim=shape.width,
        depth=shape.layers,
        heads=shape.width // HEAD,
        dim_head=HEAD,
        # It takes two thirds of the factor, because its MLP is gated.
        ff_expand_factor=(shape.mlp + 0.5) * 1.5 / shape.width,
        manual_norm_weights=True,
    ).to(device)
    model.norm_weights_()
    return model, lambda ids: model(ids, return_loss=True)


CONTENDERS: dict[str, Callable[[Shape, str], tuple[nn.Module, Loss]]] = {
    "transformers": llama(STOCK),
    "geonorm": llama("geonorm"),
    "geonorm's pre": llama("pre"),
    "x-transformers": x_transformers,
    "nGPT-pytorch": ngpt,
}


@dataclasses.dataclass(frozen=True)
class PeerSettings(ModelSettings):
    """Other libraries' models."""

    contenders: tuple[str, ...] | None = None
    """Which of them."""
    passes: int | None = None
    """How often each gets a process."""
    worker: str | None = None
    """Run one contender here and print its figures as JSON; what the processes are started with."""


PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {**SIZES["cpu"], "contenders": tuple(CONTENDERS), "passes": 2, "rounds": 3},
    "cuda": {**SIZES["cuda"], "contenders": tuple(CONTENDERS), "passes": 2, "rounds": 15},
    "quick": {**SIZES["quick"], "contenders": tuple(CONTENDERS), "passes": 1, "rounds": 3},
}


def resident(key: str) -> float:
    """Memory of this process in MiB by the kernel's account: VmRSS now, VmHWM at its peak; NaN where it has none."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="ascii").splitlines() if status.exists() else ():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return math.nan


def work(settings: PeerSettings) -> dict[str, Any]:
    """Seconds of each training step, peak memory and size of one contender, in this process."""
    shape, device = shape_of(settings), settings.device
    assert settings.worker is not None
    assert settings.rounds is not None
    ids = make_batch(dataclasses.replace(shape, tokens=shape.tokens + 1), device)
    now, before = clock(settings), resident("VmRSS")
    torch.manual_seed(0)
    model, loss_function = CONTENDERS[settings.worker](shape, device)
    model.train()
    optimizer = adamw(model)
    if settings.worker == "nGPT-pytorch":
        model.register_step_post_hook(optimizer)  # type: ignore[operator]
    seconds, losses = [], []
    for _ in range(STEPS_TO_WARM_UP + settings.rounds):
        start = now()
        with autocast(ids.device, shape.precision):
            loss = loss_function(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now() - start)
        losses.append(loss.item())
    if not all(math.isfinite(loss) for loss in losses):
        raise UserError(f"{settings.worker} does not train here: losses {losses}")
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else resident("VmHWM") - before
    return {
        "seconds": seconds[STEPS_TO_WARM_UP:],
        "peak_MiB": peak,
        "before_MiB": before,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": losses[0],
    }


def start(name: str, settings: PeerSettings, budget: Budget) -> dict[str, Any]:
    """Figures of one process, or why there are none."""
    sizes = [word for key, value in dataclasses.asdict(shape_of(settings)).items() for word in (f"--{key}", str(value))]
    rest = [
        "--device",
        settings.device,
        "--threads",
        str(settings.threads),
        "--clock",
        settings.clock,
        "--rounds",
        str(settings.rounds),
    ]
    command = [sys.executable, "-m", "benchmarks.peers", "--worker", name, *rest, *sizes]
    limit = None if math.isinf(budget.left) else max(1.0, budget.left)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": "the time was over"}
    lines, mistakes = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    if done.returncode != 0:
        return {"failed": (mistakes or ["no message"])[-1]}
    return json.loads(lines[-1])


def run(settings: PeerSettings) -> dict[str, Any]:
    """Every contender in turn, or one where a worker is named; returns and writes the result."""
    settings = fill(settings, PRESETS)
    for name in (*(settings.contenders or ()), *([settings.worker] if settings.worker else [])):
        if name not in CONTENDERS:
            raise UserError(f"`contenders` must be of {', '.join(CONTENDERS)}, got {name!r}")
    if settings.worker is not None:
        figures = work(settings)
        print(json.dumps(figures))
        return figures
    budget, result, shape = Budget(settings.seconds), header("peers", settings), shape_of(settings)
    processes: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.contenders or ()}
    for number in range(settings.passes or 1):
        for name, done in processes.items():
            if budget.left <= 0 and number > 0:
                continue
            done.append(start(name, settings, budget))
    rows = summarise(processes, shape)
    result |= {"rows": rows, "processes": processes, "seconds": budget.used}
    report("peers", settings, result, {f"Training step of a model with {shape}": rows})
    return result


def summarise(processes: dict[str, list[dict[str, Any]]], shape: Shape) -> list[dict[str, Any]]:
    """One row a contender; ratios over stock transformers compare medians of processes that took turns."""
    seconds = {
        name: [value for figures in done for value in figures.get("seconds", [])] for name, done in processes.items()
    }
    base, rows = seconds.get("transformers"), []
    for name, done in processes.items():
        good = [figures for figures in done if "failed" not in figures]
        if not good:
            rows.append({"name": name, "why": done[0]["failed"] if done else "the time was over"})
            continue
        row = {
            "name": name,
            "parameters": good[0]["parameters"],
            "ms": spread([value * 1e3 for value in seconds[name]]),
            "tokens_per_second": round(shape.batch * shape.tokens / spread(seconds[name])["median"]),
            "peak_MiB": max(figures["peak_MiB"] for figures in good),
        }
        if base and len(base) == len(seconds[name]):
            row["over_transformers"] = ratio(seconds[name], base)
        rows.append(row)
    return rows


if __name__ == "__main__":
    command_line(PeerSettings, run, __doc__)
