"""The training loop, one for a controlled comparison and for a run by itself.

What it promises: the same windows in the same order for every placement with the same seed; evaluation that leaves no
trace in the run; a non-finite loss or gradient never reaches weights or moments; gradients and losses that are means
over the tokens of a step, however it is split.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geonorm.data import Windows
from geonorm.data.windows import HeldOutWindows
from geonorm.errors import UserError
from geonorm.inspection.probe import gradient_norms, recorded_angles
from geonorm.models import normalize_weights
from geonorm.models.weights import full_tensor
from geonorm.placements import set_training_step
from geonorm.training.config import RunConfig
from geonorm.training.counters import Counters
from geonorm.training.distributed import Parallel, Ranks, solo
from geonorm.training.optimizer import Optimizers, Schedule, make_optimizer
from geonorm.training.outcome import Data, Outcome, not_finite, verdict
from geonorm.training.validation import (
    Evaluation,
    autocast,
    evaluate,
    ids_and_labels,
    label_ids,
    num_labels,
    token_losses,
    undisturbed,
)

_EVAL_BATCH = 16
_PROBE_WINDOWS = 4

Emit = Callable[[dict[str, Any]], None]


def train(
    model: nn.Module,
    windows: Windows,
    eval_windows: np.ndarray | HeldOutWindows,
    token_bytes: np.ndarray,
    config: RunConfig,
    emit: Emit = lambda row: None,
) -> Outcome:
    """Train a rewired model in place, in one process, from the first step to the last.

    Of the configuration the parts ``model``, ``data`` but for ``seq_len``, ``sampling``, ``checkpoint`` and
    ``tracking``, the device and how to run on it are what the caller has decided already; they are not looked at.

    Args:
        model: on the device to train on; its weights are where training starts.
        windows, eval_windows, token_bytes: see :class:`Data`.
        config: see :class:`geonorm.training.config.RunConfig`.
        emit: is given every row of metrics: kinds ``"train"``, ``"eval"``, ``"layers"``, ``"skipped"``, ``"spike"``,
            ``"unlabelled"``.
    """
    ranks = solo(next(model.parameters()).device)
    optimizer, schedule = make_optimizer(model, config)
    data = Data(windows, eval_windows, token_bytes)
    return Loop(Parallel(model, ranks), ranks, data, config, optimizer, schedule, emit).run()


class Loop:
    """Steps of training from wherever ``progress`` stands.

    Attributes:
        progress: changed after each step.
    """

    def __init__(
        self,
        parallel: Parallel,
        ranks: Ranks,
        data: Data,
        config: RunConfig,
        optimizer: Optimizers,
        schedule: Schedule,
        emit: Emit,
        progress: Counters | None = None,
        after_step: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make ready; ``after_step`` is called when a step and its rows are done, and true ends the loop there."""
        self.parallel, self.ranks, self.data, self.config = parallel, ranks, data, config
        self.optimizer, self.schedule, self.emit, self.after_step = optimizer, schedule, emit, after_step
        self.progress = progress or Counters.start(config.steps)
        self.model = parallel.model
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    def run(self) -> Outcome:
        """Train to the last step, or until ``after_step`` says so or too many steps in a row were skipped."""
        config, progress = self.config, self.progress
        evaluation: Evaluation | None = None
        self.model.train()
        while progress.step < config.steps:
            measured = self.take_step(progress.step + 1)
            if progress.in_a_row >= config.faults.max_skipped:
                return self._outcome("diverged", not_finite(progress), None)
            if measured is not None:
                angles = self._angles()
                self.emit({"kind": "layers", "step": progress.step, "grad_norm": measured, "angle": angles})
            evaluation = None
            if progress.step % config.evaluation.every == 0 or progress.step == config.steps:
                evaluation = self._evaluate(self.data.eval_windows)
                row = {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
                self.emit({"kind": "eval", "step": progress.step, "tokens": self._tokens(), **row})
            if self.after_step() and progress.step < config.steps:
                return self._outcome("stopped", "", None)
        # A run that was resumed at its end has its row already.
        evaluation = evaluation or self._evaluate(self.data.eval_windows)
        ending = verdict(evaluation.loss, len(self.data.token_bytes), progress)
        test = None if self.data.test_windows is None else self._evaluate(self.data.test_windows)
        return dataclasses.replace(self._outcome(*ending, evaluation), test=test)

    def take_step(self, step: int) -> list[float] | None:
        """Take one step; returns the gradient norm of each block where it is due.

        A step in which no token has a label on any rank is none: it changes nothing, and counts neither as good nor as
        skipped.
        """
        config, progress = self.config, self.progress
        begin = time.perf_counter()
        lr = self.schedule.apply(step - 1)
        set_training_step(self.model, step)
        total = self._accumulate_gradients(step)
        if total is None:
            progress.step = step
            progress.unlabelled += 1
            progress.seconds += time.perf_counter() - begin
            self.emit({"kind": "unlabelled", "step": step})
            return None
        measured = None
        if _due(step, config.evaluation.layers_every, config.steps):
            pause = time.perf_counter()
            measured = gradient_norms(self.model)
            begin += time.perf_counter() - pause
        norm = full_tensor(nn.utils.clip_grad_norm_(self._parameters, config.optimizer.clip))
        # One look at the device a step: both numbers together.
        loss, grad_norm = torch.stack([total, norm.double()]).tolist()
        good, spike = math.isfinite(loss) and math.isfinite(grad_norm), False
        if good:
            self.optimizer.step()
            normalize_weights(self.model)
            spike = progress.add_loss(loss, config.faults.spike_deviations)
        else:
            progress.add_skipped()
        self.optimizer.zero_grad()
        progress.step = step
        progress.seconds += time.perf_counter() - begin
        event = {"step": step, "loss": loss, "grad_norm": grad_norm}
        if not good:
            self.emit({"kind": "skipped", **event})
        elif spike:
            self.emit({"kind": "spike", **event})
        if good and _due(step, config.evaluation.log_every, config.steps):
            row = {"step": step, "tokens": self._tokens(), "loss": loss, "lr": lr, "grad_norm": grad_norm}
            self.emit({"kind": "train", **row, "seconds": progress.seconds})
        return measured

    def _accumulate_gradients(self, step: int) -> Tensor | None:
        """Backward over this rank's micro-batches; returns the mean loss a token of the whole step, float64.

        None, and no backward, if no token has a label on any rank.
        """
        device, config = self.ranks.device, self.config
        batch, labels = self._batch(step)
        # Labels can be missing, and not as often on one rank as on another.
        num_tokens = self._all(num_labels(labels)) if (labels < 0).any() or self.ranks.world_size > 1 else labels.size
        if num_tokens == 0:
            return None
        self.progress.labelled_tokens += num_tokens
        total = torch.zeros((), dtype=torch.float64, device=device)
        ids, wanted = (
            torch.from_numpy(part).to(device, non_blocking=True).chunk(config.accumulation) for part in (batch, labels)
        )
        for number, (part, targets) in enumerate(zip(ids, wanted, strict=True), start=1):
            with self.parallel.micro_batch(last=number == len(ids)):
                with autocast(device, config.precision):
                    losses = token_losses(self.parallel.forward, part, targets)
                (losses.sum() / num_tokens * self.parallel.gradient_scale).backward()
            total += losses.detach().double().sum()
        return self.ranks.sum(total) / num_tokens

    def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids ``[batch, length + 1]`` of this rank and what each position is to predict, ``[batch, length]``."""
        size = self.config.global_batch_size
        start, size = self.ranks.share((step - 1) * size, size)
        batch = self.data.windows.batch(start, size)
        if batch.max() >= len(self.data.token_bytes):
            raise UserError(
                f"{self.data.windows.token_file.path} holds the id {batch.max()} in the windows of step {step}, but "
                f"the vocabulary ends at {len(self.data.token_bytes) - 1}; prepare the data again"
            )
        return batch, label_ids(batch, self.data.windows.mask(start, size))

    def _all(self, count: int) -> int:
        return int(self.ranks.sum(torch.tensor(count, device=self.ranks.device)).item())

    def _evaluate(self, windows: np.ndarray | HeldOutWindows) -> Evaluation:
        return evaluate(
            self.model,
            windows,
            self.data.token_bytes,
            batch=_EVAL_BATCH,
            precision=self.config.precision,
            ranks=self.ranks,
        )

    def _angles(self) -> dict[str, list[float]]:
        device = self.ranks.device
        ids = torch.from_numpy(ids_and_labels(self.data.eval_windows)[0][:_PROBE_WINDOWS, :-1]).to(device)
        with recorded_angles(self.model) as angles, undisturbed(self.model), autocast(device, self.config.precision):
            self.model(input_ids=ids, use_cache=False)
        return angles

    def _tokens(self) -> int:
        return self.progress.step * self.config.tokens_per_step

    def _outcome(self, status: str, message: str, evaluation: Evaluation | None) -> Outcome:
        progress = self.progress
        train_loss = math.nan if status == "diverged" and evaluation is None else progress.train_loss()
        counts = self._tokens(), progress.labelled_tokens
        return Outcome(status, message, evaluation, train_loss, *counts, progress.seconds, progress.skipped)


def _due(step: int, every: int, steps: int) -> bool:
    return step == 1 or step % every == 0 or step == steps
