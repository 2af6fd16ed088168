"""What each rank of a training run does: claim the folder, restore, train, save, write the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geonorm.errors import UserError
from geonorm.ops import ensure_cpu_kernels, which
from geonorm.progress_bar import ProgressBar
from geonorm.provenance import code_version
from geonorm.signals import TRY_AGAIN, StopRequest
from geonorm.storage import write_json
from geonorm.training import folder as places
from geonorm.training import recipe
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.config import RunConfig
from geonorm.training.counters import Counters
from geonorm.training.distributed import Parallel, Ranks, recompute_blocks
from geonorm.training.folder import RunFolder
from geonorm.training.loop import Loop
from geonorm.training.manifest import Checkpoint
from geonorm.training.metrics import MetricsFile, Reporter
from geonorm.training.optimizer import make_optimizer
from geonorm.training.outcome import FIRST_STEPS, Outcome, ended, losses_by_window
from geonorm.training.sampling import sample
from geonorm.training.setup import (
    check_batch,
    check_model,
    corpus_identity,
    make_model,
    open_corpus,
    open_data,
    save_description,
)
from geonorm.training.state import collect, restore, targets
from geonorm.training.throughput import Throughput, flops_per_token, measured_peak, peak_memory
from geonorm.training.trackers import check_trackers, open_trackers

OK, DIVERGED = 0, 1
# Weights and two moments, in float32.
_NUMBERS_KEPT = 3
Say = Callable[[str], None]


class RankRun:
    """A run on one rank, from claiming its folder to its result.

    Args:
        config: see :func:`geonorm.training.run.run`.
        out: folder of the run.
        ranks: this one and the others.
        request: says when a signal asks the run to end.
        say: takes lines for the user.
        bar: shows the steps; None where nobody looks.
    """

    def __init__(
        self, config: RunConfig, out: Path, ranks: Ranks, request: StopRequest, say: Say, bar: ProgressBar | None
    ) -> None:
        self.config, self.out, self.ranks, self.request = config, out, ranks, request
        self.say, self.bar = say, bar
        check_batch(config, ranks)
        self.folder: RunFolder | None = None
        self.reporter: Reporter | None = None
        self.saved = 0

    def execute(self, *, resume: bool, overwrite: bool) -> int:
        """Claim the folder, train, let it go."""

        def claim() -> tuple[str, bool]:
            self.folder = RunFolder(self.out, self.config, resume=resume, overwrite=overwrite)
            return self.folder.id, self.folder.is_new

        self.id, self.is_new = self.ranks.on_main(claim)
        try:
            return self._train()
        finally:
            # What is being closed is closed.
            self.request.waiting_for_step = True
            if self.reporter is not None:
                self.reporter.close()
            if self.folder is not None:
                self.folder.release()

    def _train(self) -> int:
        config, ranks = self.config, self.ranks
        check_model(config)
        self.step_impl = self._decide_step()
        self.corpus = open_corpus(config, self.say)
        self.data = open_data(config, self.corpus)
        self.model = make_model(config, self.corpus)
        flops = flops_per_token(self.model, config.data.seq_len)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.model.to(ranks.device)
        if config.gradient_checkpointing:
            recompute_blocks(self.model)
        parallel = Parallel(self.model, ranks, config.parallel, compiled=config.compile)
        self.optimizer, schedule = make_optimizer(self.model, config)
        background = config.checkpoint.background
        self.checkpoints = Checkpoints(
            self.out / places.CHECKPOINTS,
            ranks,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            background=ranks.device.type == "cuda" if background is None else background,
        )
        peak = measured_peak(ranks.device, config.precision) if config.peak_flops == -1 else config.peak_flops
        ranks.on_main(self._begin)
        progress, num_bytes = self._restore()
        throughput = Throughput(flops, peak, ranks, progress.step, progress.seconds)
        ranks.on_main(lambda: self._open_reporter(throughput, num_bytes))
        emit = self.reporter.emit if self.reporter is not None else lambda row: None
        self.loop = Loop(parallel, ranks, self.data, config, self.optimizer, schedule, emit, progress, self._after_step)
        self.request.waiting_for_step = True
        if self.bar is not None:
            self.bar.begin("training", config.steps, "steps", done=progress.step)
        try:
            outcome = self.loop.run()
        finally:
            self.checkpoints.wait()
        return self._finish(outcome)

    def _decide_step(self) -> str:
        """Name of the implementation of the step that this run takes to its end, the same on every rank."""
        ranks, device = self.ranks, self.ranks.device
        if device.type != "cpu":
            return which(torch.empty(1, 1, device=device))
        # Under the compiler on a CPU the step is always the analytic one, see `geonorm.ops.which`.
        if self.config.compile:
            return "autograd"

        def decide() -> str:
            assert self.folder is not None
            return ensure_cpu_kernels(recorded=self.folder.recorded_step())

        chosen = ranks.on_main(decide)
        recorded = self.folder.recorded_step() if self.folder is not None else None
        if recorded not in (None, chosen):
            self.say(f"the step runs by {chosen} from here on, by {recorded} before: they differ by rounding")
        return chosen if ranks.is_main else ensure_cpu_kernels(recorded=chosen)

    def _begin(self) -> None:
        assert self.folder is not None
        check_trackers(self.config.tracking)
        num_bytes = _NUMBERS_KEPT * 4 * self.num_parameters
        self.folder.begin(corpus_identity(self.corpus), self.corpus.num_labels, self.step_impl, num_bytes)
        save_description(self.out / places.MODEL, self.model, self.corpus)

    def _open_reporter(self, throughput: Throughput, num_bytes: int) -> None:
        trackers = open_trackers(self.config.tracking, self.out, recipe.resolved(self.config), self.id)
        metrics = MetricsFile(self.out / places.METRICS, keep=num_bytes)
        config = self.config
        self.reporter = Reporter(metrics, trackers, throughput, config.steps, config.tokens_per_step, self.say)

    def _restore(self) -> tuple[Counters, int]:
        """Load the newest good checkpoint; returns the progress and the bytes of metrics that belong to it."""
        config, ranks = self.config, self.ranks
        if ranks.rank:
            torch.manual_seed(config.seed + ranks.rank)
        found = None
        if not self.is_new:
            found = ranks.on_main(self._find)
        if found is None:
            return Counters.start(config.steps), 0
        tensors = targets(self.model, self.optimizer, ranks, found.shapes)
        self.checkpoints.load(found, tensors)
        restore(self.model, self.optimizer, ranks, tensors, reseed=config.seed + found.step)
        self.say(f"going on from step {found.step}")
        self.saved = found.step
        # Checkpoints that do not count labels are of runs in which every token had one.
        all_labelled = {"labelled_tokens": found.step * config.tokens_per_step}
        progress = Counters.from_json({**all_labelled, **found.facts["progress"]}, config.steps)
        return progress, int(found.facts["metrics"])

    def _find(self) -> Checkpoint | None:
        assert self.folder is not None
        found, latest = self.checkpoints.find(self.id, self.say), self.folder.latest
        if found is not None and latest is not None and found.step > latest:
            raise UserError(
                f"`steps` or `schedule.decay` has changed, so {self.out} can be taken up from step {latest} at the "
                f"latest, but its newest checkpoint is of step {found.step}; delete those after step {latest}"
            )
        return found

    def _after_step(self) -> bool:
        if self.bar is not None:
            self.bar.advance()
        config, step = self.config, self.loop.progress.step
        if config.sampling.every and (step % config.sampling.every == 0 or step == config.steps):
            self._sample(step)
        stop = self._stop()
        if stop or step == config.steps or step % config.checkpoint.every == 0:
            self._save(step)
        return stop

    def _stop(self) -> bool:
        """Whether a rank was asked to end; a signal does not reach all of them within the same step."""
        asked = int(self.request.code != 0)
        if self.ranks.world_size > 1:
            asked = int(self.ranks.sum(torch.tensor(asked, device=self.ranks.device)).item())
        return asked > 0

    def _save(self, step: int) -> None:
        if step == self.saved:
            return
        facts: dict[str, Any] = {}
        if self.reporter is not None:
            num_bytes = self.reporter.metrics.sync()
            facts = {"run": self.id, "progress": self.loop.progress.to_json(), "metrics": num_bytes}
        self.checkpoints.save(step, collect(self.model, self.optimizer, self.ranks), facts)
        self.saved = step

    def _sample(self, step: int) -> None:
        from tokenizers import Tokenizer

        texts = sample(
            self.model,
            Tokenizer.from_file(str(self.corpus.tokenizer_path)),
            self.config.sampling,
            length=self.config.data.seq_len,
            precision=self.config.precision,
            seed=self.config.seed + step,
        )
        if self.reporter is not None:
            self.reporter.emit({"kind": "sample", "step": step, "texts": texts})

    def _finish(self, outcome: Outcome) -> int:
        step, steps = self.loop.progress.step, self.config.steps
        if outcome.status == "stopped":
            self.say(f"asked to end: saved step {step} of {steps}; go on with --resume")
            return self.request.code or TRY_AGAIN
        self.ranks.on_main(lambda: self._write_result(outcome))
        if outcome.status == "diverged":
            self.say(f"diverged: {outcome.message}; the last checkpoint, of step {self.saved}, is kept")
            return DIVERGED
        assert outcome.evaluation is not None
        if outcome.status == "unlearned":
            self.say(f"finished, but learned nothing: {outcome.message} after {steps} steps, in {self.out}")
            return OK if steps < FIRST_STEPS else DIVERGED
        self.say(f"finished: validation loss {outcome.evaluation.loss:.4f} after {steps} steps, in {self.out}")
        return OK

    def _write_result(self, outcome: Outcome) -> None:
        assert self.folder is not None
        result = ended(
            outcome,
            self.loop.progress,
            peak_memory_bytes=peak_memory(self.ranks.device),
            num_parameters=self.num_parameters,
            world_size=self.ranks.world_size,
            step_impl=", ".join(self.folder.step_impls),
            code=code_version(),
        )
        if (by_window := losses_by_window(outcome, self.data)) is not None:
            write_json(self.out / places.TEST_WINDOWS, by_window)
        # Last, because it says that all is there.
        write_json(self.out / places.RESULT, dataclasses.asdict(result))
