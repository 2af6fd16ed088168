"""Runs one trial in a process of its own: ``python -m geonorm.experiments.worker TRIAL_FOLDER CORPUS_FOLDER ...``.

A process a trial keeps trials apart: one that dies takes no other with it, its memory is its own, and its threads are
set before torch starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from geonorm import models
from geonorm.data import Corpus, Windows
from geonorm.errors import UserError
from geonorm.experiments.environment import code_version
from geonorm.experiments.process import WATCH_FLAG, end_with_parent
from geonorm.experiments.trials import METRICS, RESULT, SPEC, TEST_WINDOWS, Trial
from geonorm.ops import which
from geonorm.storage import write_json
from geonorm.training.loop import Data, Loop, Outcome
from geonorm.training.metrics import MetricsFile
from geonorm.training.optimizer import make_optimizer
from geonorm.training.parallel import Parallel
from geonorm.training.ranks import joined
from geonorm.training.throughput import peak_memory


def build_model(trial: Trial, eos_id: int | None = None) -> Any:
    """Make the trial's model; its weights depend on the trial's seed, shape and placement alone."""
    return models.build_model(
        trial.shape,
        trial.placement,
        trial.options,
        vocab_size=trial.vocab_size,
        length=trial.training.length,
        seed=trial.training.seed,
        eos_id=eos_id,
        use_cache=False,
    )


def run_trial(folder: Path, corpus_folder: Path, device: str = "cpu", parallel: str = "none") -> None:
    """Run the trial described in ``folder`` and write its metrics and result there; as one of several ranks, a part.

    Args:
        folder: with the trial's description; all ranks see it.
        corpus_folder: its corpus.
        device: ``"cpu"`` or ``"cuda"``.
        parallel: how ranks share the model, ``"none"``, ``"ddp"`` or ``"fsdp"``.

    Raises:
        UserError: the corpus does not fit the trial, or there is no such device.
    """
    trial = Trial.from_json(json.loads((folder / SPEC).read_text(encoding="utf-8")))
    corpus = Corpus.load(corpus_folder)
    settings = trial.training
    val, test = (corpus.held_out(side, settings.length, settings.eval_windows) for side in ("val", "test"))
    windows = Windows(corpus.train, length=settings.length, seed=settings.seed)
    with joined(parallel, device) as ranks:
        # Drawn on the CPU, so that every device starts from the same weights.
        model = build_model(trial, corpus.eos_id).to(ranks.device)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if ranks.rank:
            torch.manual_seed(settings.seed + ranks.rank)
        ways = Parallel(model, ranks, parallel)
        optimizer, schedule = make_optimizer(model, settings)
        metrics = MetricsFile(folder / METRICS) if ranks.is_main else None
        emit = metrics.write if metrics else lambda row: None
        data = Data(windows, val, corpus.token_bytes, test)
        try:
            outcome = Loop(ways, ranks, data, settings, optimizer, schedule, emit).run()
        finally:
            if metrics:
                metrics.close()
        if not ranks.is_main:
            return
        if outcome.test is not None:
            by_window = {
                "loss": outcome.test.window_losses.tolist(),
                "labels": outcome.test.window_labels.tolist(),
                "document": test.groups[outcome.test.labelled_windows].tolist(),
            }
            write_json(folder / TEST_WINDOWS, by_window)
        write_json(folder / RESULT, _result(trial, outcome, num_parameters, ranks.device))


def _result(trial: Trial, outcome: Outcome, num_parameters: int, device: torch.device) -> dict[str, Any]:
    evaluation, test = outcome.evaluation, outcome.test
    return trial.result(
        outcome.status,
        outcome.message,
        val_loss=evaluation.loss if evaluation else None,
        val_bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        test_loss=test.loss if test else None,
        test_bits_per_byte=test.bits_per_byte if test else None,
        train_loss=outcome.train_loss,
        num_parameters=num_parameters,
        tokens=outcome.tokens,
        labelled_tokens=outcome.labelled_tokens,
        seconds=outcome.seconds,
        skipped_steps=outcome.skipped,
        tokens_per_second=outcome.tokens / outcome.seconds,
        peak_memory_bytes=peak_memory(device),
        code=code_version(),
        step=which(torch.empty(1, 1, device=device)),
    )


def main(words: list[str]) -> int:
    """Entry of the process; the last line it prints says why it failed."""
    parser = argparse.ArgumentParser(description="Run one trial.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parallel", default="none", choices=("none", "ddp", "fsdp"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(WATCH_FLAG, choices=("keep", "remove"), help="end when standard input is closed")
    arguments = parser.parse_args(words)
    if arguments.end_with_parent:
        end_with_parent(arguments.folder if arguments.end_with_parent == "remove" else None)
    torch.set_num_threads(arguments.threads)
    try:
        run_trial(arguments.folder, arguments.corpus, arguments.device, arguments.parallel)
    except UserError as error:
        print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
