"""What a run of the loop reads and how it ended, with the rule for that."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from geonorm.data import Windows
from geonorm.data.windows import HeldOutWindows
from geonorm.training.counters import Counters
from geonorm.training.result import RunResult
from geonorm.training.validation import Evaluation

# A model that gives every token the same probability has the loss of guessing up to rounding, so neither that loss nor
# one a little above it, where a new model starts, may lie on a border: in nats, what has to be learned at least, and
# what a loss may rise above its lowest without having diverged.
LEARNED = 0.05
RISE = 0.5
# So few steps need not teach a model anything.
FIRST_STEPS = 100


@dataclasses.dataclass
class Data:
    """What a run reads.

    Attributes:
        windows: training windows; step k uses windows ``k * batch`` to ``(k + 1) * batch - 1`` of their order.
        eval_windows: fixed windows ``[num_windows, length + 1]`` of ids, of the validation side, or ids with a mask.
        token_bytes: bytes that each token id stands for.
        test_windows: the same of the test side, looked at once, after the last step; None for no such look.
    """

    windows: Windows
    eval_windows: np.ndarray | HeldOutWindows
    token_bytes: np.ndarray
    test_windows: np.ndarray | HeldOutWindows | None = None


@dataclasses.dataclass
class Outcome:
    """How a run ended.

    Attributes:
        status: ``"ok"``, ``"diverged"``, ``"unlearned"`` if it is no better than guessing, or ``"stopped"`` if it was
            asked to end before its last step. See :func:`verdict`.
        message: why it counts as diverged or unlearned, else empty.
        evaluation: at the last step; None if the run ended before it.
        train_loss: mean over the last tenth of the steps, those skipped left out, nats a token.
        tokens: tokens trained on; labelled_tokens: those of them that had a label.
        seconds: wall time of training steps alone, without evaluation and measurements.
        skipped: steps whose loss or gradient was not finite; they changed nothing.
        test: on the test side after the last step, where there is one.
    """

    status: str
    message: str
    evaluation: Evaluation | None
    train_loss: float
    tokens: int
    labelled_tokens: int
    seconds: float
    skipped: int
    test: Evaluation | None = None


def verdict(val_loss: float, vocab_size: int, progress: Counters) -> tuple[str, str]:
    """How a run that came to its last step has ended: status and, where that is not ``"ok"``, the reason.

    ``"diverged"``: the last step was skipped, the loss is not finite, or it is no better than guessing and lies more
    than 0.5 nats above the lowest of the latest training losses, or above guessing after the first steps.
    ``"unlearned"``: it is no better than guessing otherwise, as after a few steps. No
    better than guessing is a loss above ``log(vocab_size) - 0.05``.
    """
    guess = math.log(vocab_size)
    if progress.in_a_row:
        return "diverged", not_finite(progress)
    if not math.isfinite(val_loss):
        return "diverged", "the validation loss is not finite"
    if val_loss <= guess - LEARNED:
        return "ok", ""
    # While the first losses are among the latest they tell where the model started, which may be above guessing.
    begun = 0 < len(progress.recent) < (progress.recent.maxlen or 0)
    rose = val_loss > min(progress.recent if begun else [guess, *progress.recent]) + RISE
    reason = f"the validation loss {val_loss:.3f} is no better than guessing ({guess:.3f})"
    return ("diverged" if rose else "unlearned"), reason


def not_finite(progress: Counters) -> str:
    """Up to which step losses or gradients were not finite, in words."""
    steps = "the last step" if progress.in_a_row == 1 else f"{progress.in_a_row} steps in a row"
    return f"loss or gradient was not finite in {steps}, up to step {progress.step}"


def ended(outcome: Outcome, counters: Counters, **facts: Any) -> RunResult:
    """The result of a run from its outcome; ``facts`` are the fields of `RunResult` that it does not know."""
    losses = {
        f"{side}_{name}": getattr(found, name) if found else None
        for side, found in (("val", outcome.evaluation), ("test", outcome.test))
        for name in ("loss", "bits_per_byte")
    }
    return RunResult(
        status=outcome.status,
        message=outcome.message,
        step=counters.step,
        train_loss=outcome.train_loss,
        skipped_steps=outcome.skipped,
        unlabelled_steps=counters.unlabelled,
        loss_spikes=counters.spikes,
        tokens=outcome.tokens,
        labelled_tokens=outcome.labelled_tokens,
        seconds=outcome.seconds,
        tokens_per_second=outcome.tokens / outcome.seconds if outcome.seconds else None,
        **losses,
        **facts,
    )


def losses_by_window(outcome: Outcome, data: Data) -> dict[str, np.ndarray] | None:
    """Loss, number of labels and document of each test window; None if there was no look at the test side."""
    test, windows = outcome.test, data.test_windows
    if test is None or not isinstance(windows, HeldOutWindows):
        return None
    documents = windows.groups[test.labelled_windows]
    return {"loss": test.window_losses, "labels": test.window_labels, "document": documents}
