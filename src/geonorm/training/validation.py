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

from geonorm.data.windows import HeldOutWindows
from geonorm.errors import UserError
from geonorm.training.distributed import Ranks, solo

# The label that losses leave out, torch's own; as an input it stands for padding.
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result on fixed windows.

    Attributes:
        loss: mean nats a token, over all tokens of all windows that have a label.
        bits_per_byte: bits for each byte of text that the target tokens stand for.
        window_losses: mean nats a token of each window that has a label, float64 ``[num_labelled]``.
        window_labels: number of labels of each of those windows, int64 ``[num_labelled]``.
        labelled_windows: numbers of those windows, int64 ``[num_labelled]``.
    """

    loss: float
    bits_per_byte: float
    window_losses: np.ndarray
    window_labels: np.ndarray
    labelled_windows: np.ndarray


def token_losses(model: nn.Module, windows: Tensor, labels: Tensor | None = None) -> Tensor:
    """Loss of each target token in float32, ``[batch, length]``, for windows ``[batch, length + 1]`` of ids.

    ``labels``, int64 ``[batch, length]``, are what each position is to predict, by default the id that follows it.
    A label of -100 has the loss 0; the id it stands beside is read all the same. An id of -100 is padding: it is
    neither read nor predicted.
    """
    logits = model(input_ids=windows[:, :-1].clamp_min(0), use_cache=False).logits
    targets = windows[:, 1:] if labels is None else labels
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the mode and the random stream are as they were."""
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(was_training)
        # FSDP keeps the parameters of the outermost module whole for a backward pass, which does not come.
        if hasattr(model, "reshard"):
            model.reshard()  # type: ignore[operator]


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Autocast to bfloat16 for ``"bf16"``, nothing for ``"fp32"``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def label_ids(windows: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """What each position of windows ``[n, length + 1]`` is to predict, ``[n, length]``: the id that follows it.

    Where ``mask``, bool ``[n, length + 1]``, is false, that id has no label, which is -100.
    """
    return windows[:, 1:] if mask is None else np.where(mask[:, 1:], windows[:, 1:], IGNORED)


def ids_and_labels(windows: np.ndarray | HeldOutWindows) -> tuple[np.ndarray, np.ndarray]:
    """Ids ``[n, length + 1]`` and labels ``[n, length]`` of windows with or without a mask."""
    if isinstance(windows, HeldOutWindows):
        return windows.ids, label_ids(windows.ids, windows.mask)
    return windows, label_ids(windows, None)


def num_labels(labels: np.ndarray) -> int:
    """Number of target tokens in labels ``[num_windows, length]`` that have one."""
    return int(np.count_nonzero(labels != IGNORED))


def evaluate(
    model: nn.Module,
    windows: np.ndarray | HeldOutWindows,
    token_bytes: np.ndarray,
    *,
    batch: int,
    precision: str,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Evaluate on windows ``[num_windows, length + 1]``; ``batch`` changes nothing but speed and rounding.

    Several ranks share the windows; each gets the whole result. Tokens without a label count neither as tokens nor as
    bytes.

    Raises:
        UserError: no token of any window has a label.
    """
    ids, targets = ids_and_labels(windows)
    labelled = targets != IGNORED
    counts = np.count_nonzero(labelled, axis=1)
    if not counts.any():
        raise UserError(f"no token of the {len(ids)} windows to evaluate on has a label; give text that has some")
    device = next(model.parameters()).device
    ranks = ranks or solo(device)
    # Every rank takes as many passes as the others, because passes of a model that is cut over them are made together.
    share = -(-len(ids) // ranks.world_size)
    mine = np.minimum(np.arange(ranks.rank * share, (ranks.rank + 1) * share), len(ids) - 1)
    rows = []
    with undisturbed(model), autocast(device, precision):
        for start in range(0, share, batch):
            some = mine[start : start + batch]
            part, labels = (torch.from_numpy(array[some]).to(device) for array in (ids, targets))
            rows.append(token_losses(model, part, labels).cpu().numpy())
    losses = ranks.concatenate(np.concatenate(rows))[: len(ids)].astype(np.float64)
    num_bytes = int(token_bytes[targets[labelled]].sum())
    bits = float(losses.sum()) / math.log(2)
    return Evaluation(
        loss=float(losses.sum() / counts.sum()),
        bits_per_byte=bits / num_bytes if num_bytes else math.nan,
        window_losses=losses.sum(axis=1)[counts > 0] / counts[counts > 0],
        window_labels=counts[counts > 0],
        labelled_windows=np.flatnonzero(counts),
    )
