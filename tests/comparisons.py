"""Tiny comparisons through the command line."""

from __future__ import annotations

import json
from pathlib import Path

from geonorm.cli import main

WORDS = ["steps=6", "model.hidden_size=16", "data.seq_len=16", "evaluation.windows=8"]
SMALL = [*WORDS, "--preset", "tiny"]


def results_in(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def run_compare(out: Path, data: Path, *words: str) -> int:
    return main(["compare", *SMALL, "--data", str(data), "--out", str(out), *words])
