"""Loss on fixed windows, without a trace in the training run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result on fixed windows.

    Attributes:
        loss: mean nats a token, over all tokens of all windows.
        bits_per_byte: bits for each byte of text that the target tokens stand for.
        window_losses: mean nats a token of each window, float64 ``[num_windows]``.
    """

    loss: float
    bits_per_byte: float
    window_losses: np.ndarray


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Loss of each target token in float32, ``[batch, length]``, for windows ``[batch, length + 1]`` of ids."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    targets = windows[:, 1:]
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the mode and the random stream are as they were."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        model.train(was_training)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Autocast to bfloat16 for ``"bf16"``, nothing for ``"fp32"``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def evaluate(
    model: nn.Module, windows: np.ndarray, token_bytes: np.ndarray, *, batch: int, precision: str
) -> Evaluation:
    """Evaluate on windows ``[num_windows, length + 1]``; ``batch`` changes nothing but speed and rounding."""
    device = next(model.parameters()).device
    rows = []
    with undisturbed(model), autocast(device, precision):
        for start in range(0, len(windows), batch):
            ids = torch.from_numpy(windows[start : start + batch]).to(device)
            rows.append(token_losses(model, ids).double().cpu().numpy())
    losses = np.concatenate(rows)
    num_bytes = int(token_bytes[windows[:, 1:]].sum())
    bits = float(losses.sum()) / math.log(2)
    return Evaluation(float(losses.mean()), bits / num_bytes if num_bytes else math.nan, losses.mean(axis=1))
