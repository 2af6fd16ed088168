"""The training loop of a controlled comparison.

What it promises: the same windows in the same order for every placement with the same seed; evaluation that leaves no
trace in the run; a non-finite loss or gradient never reaches the weights.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from geonorm.data import Windows
from geonorm.training.evaluation import Evaluation, autocast, evaluate, token_losses, undisturbed
from geonorm.training.optimizer import make_optimizer
from geonorm.training.probe import gradient_norms, recorded_angles
from geonorm.training.settings import TrainSettings

# So many skipped steps in a row will not mend themselves: the run has diverged.
MAX_SKIPPED_IN_A_ROW = 10
_EVAL_BATCH = 16
_PROBE_WINDOWS = 4


@dataclasses.dataclass
class Outcome:
    """How a run ended.

    Attributes:
        status: ``"ok"`` or ``"diverged"``.
        message: why it counts as diverged, else empty.
        evaluation: at the last step; None if the run diverged before it.
        train_loss: mean over the last tenth of the steps, those skipped left out, nats a token.
        tokens: tokens trained on.
        seconds: wall time of training steps alone, without evaluation and measurements.
        skipped: steps whose loss or gradient was not finite; they changed nothing.
    """

    status: str
    message: str
    evaluation: Evaluation | None
    train_loss: float
    tokens: int
    seconds: float
    skipped: int


def train(
    model: nn.Module,
    windows: Windows,
    eval_windows: np.ndarray,
    token_bytes: np.ndarray,
    settings: TrainSettings,
    emit: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Outcome:
    """Train a rewired model in place.

    Args:
        model: on the device to train on; its weights are where training starts.
        windows: training windows; step k uses windows ``k * batch`` to ``(k + 1) * batch - 1`` of their order.
        eval_windows: fixed windows ``[num_windows, length + 1]`` of ids.
        token_bytes: bytes that each token id stands for.
        settings: see :class:`TrainSettings`.
        emit: is given every row of metrics: kinds ``"train"``, ``"eval"``, ``"layers"``, ``"skipped"``.
    """
    device = next(model.parameters()).device
    optimizer, scheduler = make_optimizer(model, settings)
    model.train()
    losses: list[float] = []
    evaluation: Evaluation | None = None
    seconds, skipped, in_a_row = 0.0, 0, 0
    for step in range(1, settings.steps + 1):
        begin = time.perf_counter()
        lr = optimizer.param_groups[0]["lr"]
        batch = torch.from_numpy(windows.batch((step - 1) * settings.batch, settings.batch)).to(device)
        loss = _accumulate_gradients(model, batch, settings)
        measured = _due(step, settings.layers_every, settings.steps)
        pause = time.perf_counter()
        layer_gradients = gradient_norms(model) if measured else []
        begin += time.perf_counter() - pause
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip).item()
        if math.isfinite(loss) and math.isfinite(norm):
            optimizer.step()
            losses.append(loss)
            in_a_row = 0
        else:
            skipped += 1
            in_a_row += 1
            emit({"kind": "skipped", "step": step, "loss": loss, "grad_norm": norm})
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        seconds += time.perf_counter() - begin
        tokens = step * settings.batch * settings.length
        if _due(step, settings.log_every, settings.steps):
            row = {"step": step, "tokens": tokens, "loss": loss, "lr": lr, "grad_norm": norm, "seconds": seconds}
            emit({"kind": "train", **row})
        if in_a_row == MAX_SKIPPED_IN_A_ROW:
            message = f"loss or gradient was not finite in {in_a_row} steps in a row, up to step {step}"
            return Outcome("diverged", message, None, math.nan, tokens, seconds, skipped)
        if measured:
            angles = _angles(model, eval_windows[:_PROBE_WINDOWS], settings.precision)
            emit({"kind": "layers", "step": step, "grad_norm": layer_gradients, "angle": angles})
        if step % settings.eval_every == 0 or step == settings.steps:
            evaluation = evaluate(model, eval_windows, token_bytes, batch=_EVAL_BATCH, precision=settings.precision)
            row = {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
            emit({"kind": "eval", "step": step, "tokens": tokens, **row})
    assert evaluation is not None
    tail = losses[-max(1, settings.steps // 10) :]
    train_loss = float(np.mean(tail)) if tail else math.nan
    status, message = _verdict(evaluation.loss, len(token_bytes))
    return Outcome(status, message, evaluation, train_loss, settings.tokens, seconds, skipped)


def _due(step: int, every: int, steps: int) -> bool:
    return step == 1 or step % every == 0 or step == steps


def _accumulate_gradients(model: nn.Module, batch: torch.Tensor, settings: TrainSettings) -> float:
    """Backward over the micro-batches; returns the mean loss a token over the whole batch."""
    num_tokens = batch.shape[0] * (batch.shape[1] - 1)
    total = torch.zeros((), dtype=torch.float64)
    for part in batch.chunk(settings.accumulation):
        with autocast(batch.device, settings.precision):
            losses = token_losses(model, part)
        (losses.sum() / num_tokens).backward()
        total += losses.detach().double().sum().cpu()
    return total.item() / num_tokens


def _angles(model: nn.Module, windows: np.ndarray, precision: str) -> dict[str, list[float]]:
    device = next(model.parameters()).device
    ids = torch.from_numpy(windows[:, :-1]).to(device)
    with recorded_angles(model) as angles, undisturbed(model), autocast(device, precision):
        model(input_ids=ids, use_cache=False)
    return angles


def _verdict(val_loss: float, vocab_size: int) -> tuple[str, str]:
    chance = math.log(vocab_size)
    if not math.isfinite(val_loss):
        return "diverged", "the validation loss is not finite"
    if val_loss >= chance:
        return "diverged", f"the validation loss {val_loss:.3f} is no better than guessing ({chance:.3f})"
    return "ok", ""
