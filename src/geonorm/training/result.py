"""How a run ended, in numbers and names: the content of ``result.json``, and of each trial in ``results.json``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a training run ended; losses in nats a token, None where it did not come to them.

    Attributes:
        status: ``"ok"``, ``"diverged"``, ``"unlearned"``; of a trial also ``"failed"``, for a reason outside training.
        message: why, where it is not ``"ok"``.
        step: optimiser steps done.
        val_loss, test_loss: at the last step, on the fixed windows of each side; the same in bits per byte.
        train_loss: mean over the last tenth of the steps, those skipped left out.
        skipped_steps: steps whose loss or gradient was not finite; unlabelled_steps: those without a label.
        tokens: trained on; labelled_tokens: those of them that had a label.
        seconds: wall time of training steps alone.
        world_size: processes that trained together.
        step_impl: implementations of the step on the sphere that ran, see `geonorm.ops.which`; several where a resumed
            run met another one.
        code: version of geonorm with a digest of its source.
    """

    status: str
    message: str = ""
    step: int = 0
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    test_loss: float | None = None
    test_bits_per_byte: float | None = None
    train_loss: float | None = None
    skipped_steps: int = 0
    unlabelled_steps: int = 0
    loss_spikes: int = 0
    tokens: int = 0
    labelled_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    num_parameters: int | None = None
    world_size: int = 1
    step_impl: str | None = None
    code: str | None = None
