"""Options of ``geonorm compare``. Imports nothing heavy, so that help texts appear at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Train one small model for every placement under equal conditions, and report.

    What is left out comes from the preset.
    """

    placements: tuple[str, ...] = ()
    """Placements, each NAME or NAME:OPTION=VALUE,... such as geonorm:decay=sqrt"""
    data: tuple[Path, ...] = ()
    """Text, jsonl or parquet files, or folders of them; without it, text that is on every machine"""
    preset: str = "demo"
    """demo, small or tiny"""
    out: Path = Path("runs/compare")
    """Folder for results, report and one folder a trial"""
    resume: bool = False
    """Continue in a folder that exists: finished trials are kept"""
    steps: int | None = None
    """Optimiser steps a trial"""
    lrs: tuple[float, ...] = ()
    """Peak learning rates to try, the same for every placement"""
    seeds: tuple[int, ...] = (0,)
    """Seeds. With several rates the first seed chooses each placement's rate and the others run at it alone"""
    full_grid: bool = False
    """Run every learning rate with every seed"""
    jobs: int | None = None
    """Trials side by side, one thread each; all cores by default"""
    width: int | None = None
    """Width of the model"""
    depth: int | None = None
    """Number of layers"""
    heads: int | None = None
    """Attention heads"""
    length: int | None = None
    """Tokens a window"""
    batch: int | None = None
    """Windows a step"""
    accumulation: int | None = None
    """Micro-batches that a step is split into"""
    warmup: int | None = None
    """Steps of warm-up; a tenth of --steps if that is given"""
    precision: str | None = None
    """fp32 or bf16 (autocast)"""
    weight_decay: float | None = None
    """AdamW's weight decay"""
    vocab_size: int | None = None
    """Size of the tokenizer trained on the data; 257 means bytes"""
    eval_windows: int | None = None
    """Validation windows"""
    eval_every: int | None = None
    """Steps between evaluations"""
