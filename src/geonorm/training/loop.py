"""The training loop, one for a controlled comparison and for a run by itself.

What it promises: the same windows in the same order for every placement with the same seed; evaluation that leaves no
trace in the run; a non-finite loss or gradient never reaches weights or moments; gradients and losses that are means
over the tokens of a step, however it is split.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geonorm.data import Windows
from geonorm.errors import UserError
from geonorm.inspection.probe import gradient_norms, recorded_angles
from geonorm.training.evaluation import (
    Evaluation,
    autocast,
    evaluate,
    num_labels,
    token_losses,
    undisturbed,
)
from geonorm.training.optimizer import Optimizers, make_optimizer
from geonorm.training.parallel import Parallel, whole
from geonorm.training.progress import Progress
from geonorm.training.ranks import Ranks, solo
from geonorm.training.schedule import Schedule
from geonorm.training.settings import TrainSettings

# So many skipped steps in a row will not mend themselves: the run has diverged.
MAX_SKIPPED_IN_A_ROW = 10
SPIKE_DEVIATIONS = 7.0
# So few steps need not bring the loss below guessing, unless it rose by so many nats above its lowest.
_FIRST_STEPS = 100
_RISE = 0.5
_EVAL_BATCH = 16
_PROBE_WINDOWS = 4

Emit = Callable[[dict[str, Any]], None]


@dataclasses.dataclass
class Outcome:
    """How a run ended.

    Attributes:
        status: ``"ok"``, ``"diverged"``, or ``"stopped"`` if it was asked to end before its last step.
        message: why it counts as diverged, else empty.
        evaluation: at the last step; None if the run ended before it.
        train_loss: mean over the last tenth of the steps, those skipped left out, nats a token.
        tokens: tokens trained on.
        seconds: wall time of training steps alone, without evaluation and measurements.
        skipped: steps whose loss or gradient was not finite; they changed nothing.
        test: on the test side after the last step, where there is one.
    """

    status: str
    message: str
    evaluation: Evaluation | None
    train_loss: float
    tokens: int
    seconds: float
    skipped: int
    test: Evaluation | None = None


@dataclasses.dataclass
class Data:
    """What a run reads.

    Attributes:
        windows: training windows; step k uses windows ``k * batch`` to ``(k + 1) * batch - 1`` of their order.
        eval_windows: fixed windows ``[num_windows, length + 1]`` of ids, of the validation side.
        token_bytes: bytes that each token id stands for.
        test_windows: the same of the test side, looked at once, after the last step; None for no such look.
    """

    windows: Windows
    eval_windows: np.ndarray
    token_bytes: np.ndarray
    test_windows: np.ndarray | None = None


def train(
    model: nn.Module,
    windows: Windows,
    eval_windows: np.ndarray,
    token_bytes: np.ndarray,
    settings: TrainSettings,
    emit: Emit = lambda row: None,
) -> Outcome:
    """Train a rewired model in place, in one process, from the first step to the last.

    Args:
        model: on the device to train on; its weights are where training starts.
        windows, eval_windows, token_bytes: see :class:`Data`.
        settings: see :class:`TrainSettings`.
        emit: is given every row of metrics: kinds ``"train"``, ``"eval"``, ``"layers"``, ``"skipped"``, ``"spike"``.
    """
    ranks = solo(next(model.parameters()).device)
    optimizer, schedule = make_optimizer(model, settings)
    data = Data(windows, eval_windows, token_bytes)
    return Loop(Parallel(model, ranks), ranks, data, settings, optimizer, schedule, emit).run()


class Loop:
    """Steps of training from wherever ``progress`` stands.

    Attributes:
        progress: changed after each step.
        after_step: called when a step and its rows are done; true ends the loop there.
        max_skipped, spike_deviations: see :class:`geonorm.training.config.FaultConfig`.
    """

    def __init__(
        self,
        parallel: Parallel,
        ranks: Ranks,
        data: Data,
        settings: TrainSettings,
        optimizer: Optimizers,
        schedule: Schedule,
        emit: Emit,
        progress: Progress | None = None,
    ) -> None:
        self.parallel, self.ranks, self.data, self.settings = parallel, ranks, data, settings
        self.optimizer, self.schedule, self.emit = optimizer, schedule, emit
        self.progress = progress or Progress.start(settings.steps)
        self.after_step: Callable[[], bool] = lambda: False
        self.max_skipped, self.spike_deviations = MAX_SKIPPED_IN_A_ROW, SPIKE_DEVIATIONS
        self.model = parallel.model
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    def run(self) -> Outcome:
        """Train to the last step, or until ``after_step`` says so or too many steps in a row were skipped."""
        settings, progress = self.settings, self.progress
        evaluation: Evaluation | None = None
        self.model.train()
        while progress.step < settings.steps:
            measured = self.take_step(progress.step + 1)
            if progress.in_a_row >= self.max_skipped:
                message = (
                    f"loss or gradient was not finite in {progress.in_a_row} steps in a row, up to step {progress.step}"
                )
                return self._outcome("diverged", message, None)
            if measured is not None:
                angles = self._angles()
                self.emit({"kind": "layers", "step": progress.step, "grad_norm": measured, "angle": angles})
            evaluation = None
            if progress.step % settings.eval_every == 0 or progress.step == settings.steps:
                evaluation = self._evaluate(self.data.eval_windows)
                row = {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
                self.emit({"kind": "eval", "step": progress.step, "tokens": self._tokens(), **row})
            if self.after_step() and progress.step < settings.steps:
                return self._outcome("stopped", "", None)
        # A run that was resumed at its end has its row already.
        evaluation = evaluation or self._evaluate(self.data.eval_windows)
        verdict = _verdict(evaluation.loss, len(self.data.token_bytes), progress.recent)
        test = None if self.data.test_windows is None else self._evaluate(self.data.test_windows)
        return dataclasses.replace(self._outcome(*verdict, evaluation), test=test)

    def take_step(self, step: int) -> list[float] | None:
        """Take one step; returns the gradient norm of each block where it is due."""
        settings, progress = self.settings, self.progress
        begin = time.perf_counter()
        lr = self.schedule.apply(step - 1)
        total = self._accumulate_gradients(step)
        measured = None
        if _due(step, settings.layers_every, settings.steps):
            pause = time.perf_counter()
            measured = gradient_norms(self.model)
            begin += time.perf_counter() - pause
        norm = whole(nn.utils.clip_grad_norm_(self._parameters, settings.clip))
        # One look at the device a step: both numbers together.
        loss, grad_norm = torch.stack([total, norm.double()]).tolist()
        spike = False
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.optimizer.step()
            spike = progress.add_loss(loss, self.spike_deviations)
        else:
            progress.add_skipped()
        self.optimizer.zero_grad()
        progress.step = step
        progress.seconds += time.perf_counter() - begin
        event = {"step": step, "loss": loss, "grad_norm": grad_norm}
        if progress.in_a_row:
            self.emit({"kind": "skipped", **event})
        elif spike:
            self.emit({"kind": "spike", **event})
        if _due(step, settings.log_every, settings.steps):
            row = {"step": step, "tokens": self._tokens(), "loss": loss, "lr": lr, "grad_norm": grad_norm}
            self.emit({"kind": "train", **row, "seconds": progress.seconds})
        return measured

    def _accumulate_gradients(self, step: int) -> Tensor:
        """Backward over this rank's micro-batches; returns the mean loss a token of the whole step, float64."""
        device, settings = self.ranks.device, self.settings
        batch = self._batch(step)
        # Labels can be missing, and not as often on one rank as on another.
        num_tokens = self._all(num_labels(batch)) if (batch < 0).any() or self.ranks.size > 1 else batch[:, 1:].size
        total = torch.zeros((), dtype=torch.float64, device=device)
        parts = torch.from_numpy(batch).to(device, non_blocking=True).chunk(settings.accumulation)
        for number, part in enumerate(parts, start=1):
            with self.parallel.micro_batch(last=number == len(parts)):
                with autocast(device, settings.precision):
                    losses = token_losses(self.parallel.forward, part)
                (losses.sum() / num_tokens * self.parallel.gradient_scale).backward()
            total += losses.detach().double().sum()
        return self.ranks.sum(total) / num_tokens

    def _batch(self, step: int) -> np.ndarray:
        start, size = self.ranks.share((step - 1) * self.settings.batch, self.settings.batch)
        batch = self.data.windows.batch(start, size)
        if batch.max() >= len(self.data.token_bytes):
            raise UserError(
                f"{self.data.windows.token_file.path} holds the id {batch.max()} in the windows of step {step}, but "
                f"the vocabulary ends at {len(self.data.token_bytes) - 1}; prepare the data again"
            )
        return batch

    def _all(self, count: int) -> int:
        return int(self.ranks.sum(torch.tensor(count, device=self.ranks.device)).item())

    def _evaluate(self, windows: np.ndarray) -> Evaluation:
        return evaluate(
            self.model,
            windows,
            self.data.token_bytes,
            batch=_EVAL_BATCH,
            precision=self.settings.precision,
            ranks=self.ranks,
        )

    def _angles(self) -> dict[str, list[float]]:
        device = self.ranks.device
        ids = torch.from_numpy(self.data.eval_windows[:_PROBE_WINDOWS, :-1]).to(device)
        with recorded_angles(self.model) as angles, undisturbed(self.model), autocast(device, self.settings.precision):
            self.model(input_ids=ids, use_cache=False)
        return angles

    def _tokens(self) -> int:
        return self.progress.step * self.settings.batch * self.settings.length

    def _outcome(self, status: str, message: str, evaluation: Evaluation | None) -> Outcome:
        progress = self.progress
        train_loss = math.nan if status == "diverged" and evaluation is None else progress.train_loss()
        return Outcome(status, message, evaluation, train_loss, self._tokens(), progress.seconds, progress.skipped)


def _due(step: int, every: int, steps: int) -> bool:
    return step == 1 or step % every == 0 or step == steps


def _verdict(val_loss: float, vocab_size: int, losses: Sequence[float]) -> tuple[str, str]:
    chance = math.log(vocab_size)
    if not math.isfinite(val_loss):
        return "diverged", "the validation loss is not finite"
    # A new model starts a little above guessing, so a short run may end there although nothing went wrong.
    just_begun = 0 < len(losses) < _FIRST_STEPS and val_loss <= min(losses) + _RISE
    if val_loss >= chance and not just_begun:
        return "diverged", f"the validation loss {val_loss:.3f} is no better than guessing ({chance:.3f})"
    return "ok", ""
