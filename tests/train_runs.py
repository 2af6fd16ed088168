"""Tiny runs of ``geonorm train`` and what tests look at in their folders."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from safetensors import safe_open

from corpora import small_corpus
from geonorm.data import Corpus
from geonorm.training import RunConfig, metrics
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.distributed import solo
from geonorm.training.manifest import Checkpoint, verify
from geonorm.training.recipe import load
from geonorm.training.run import run

TINY = (
    *("model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "data.seq_len=40", "data.vocab_size=257"),
    *("data.min_documents=1", "data.max_share=1", "data.val_fraction=0.2", "data.test_fraction=0.2"),
    *("steps=30", "global_batch_size=4", "accumulation=2", "schedule.warmup=20", "optimizer.lr=1e-2"),
    *("evaluation.every=10", "evaluation.windows=6", "evaluation.layers_every=20", "evaluation.log_every=1"),
    *("checkpoint.every=8", "device=cpu"),
)


def tiny_corpus(folder: Path) -> Corpus:
    """A corpus of so few windows that 30 steps of 4 pass more than one epoch."""
    return small_corpus(folder, count=4)


def tiny(corpus: Corpus | Path, *overrides: str) -> RunConfig:
    """Configuration of a run that takes about a second."""
    path = corpus.path if isinstance(corpus, Corpus) else corpus
    return load([], [*TINY, f"data.corpus={path}", *overrides]).filled()


def rows(out: Path, kind: str = "train") -> list[dict]:
    """Rows of metrics, without what depends on the clock."""
    clock = ("seconds", "step_seconds", "tokens_per_second", "mfu", "peak_memory_bytes")
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if k not in clock} for row in found if row["kind"] == kind]


def checkpoint(out: Path, step: int) -> Checkpoint:
    return verify(out / "checkpoints" / f"step-{step}")


def tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, from however many ranks."""
    found = checkpoint(out, step)
    into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in found.shapes.items()}
    Checkpoints(out / "checkpoints", solo(torch.device("cpu"))).load(found, into)
    return into


def assert_same_end(left: Path, right: Path, step: int = 30) -> None:
    """Weights, moments, random streams, counters and rows are equal bit for bit."""
    mine, theirs = tensors(left, step), tensors(right, step)
    assert mine.keys() == theirs.keys()
    assert any(name.startswith("optimizer.") for name in mine)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    facts = [checkpoint(out, step).facts["progress"] for out in (left, right)]
    assert {**facts[0], "seconds": 0} == {**facts[1], "seconds": 0}
    for kind in ("train", "eval", "layers", "skipped", "spike", "sample"):
        assert rows(left, kind) == rows(right, kind), kind


def stop_after(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to this process when a step has been reported, once."""
    original, sent = metrics.Reporter.emit, []

    def emit(self, row):
        original(self, row)
        if row["kind"] == "train" and row["step"] == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.Reporter, "emit", emit)


def finish(config: RunConfig, out: Path) -> Path:
    """Run to the end, from wherever the folder stands."""
    assert run(config, out, resume=True) == 0
    return out


def tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as opened:
        return list(opened.keys())
