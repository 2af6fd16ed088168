"""A small corpus of made-up but learnable text, and small trials on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geonorm.data import Corpus, prepare
from geonorm.progress_bar import ProgressBar

# For a handful of documents; what the limits do is tested apart.
FEW = {"min_documents": 1, "max_share": 1.0}


def write_documents(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """Write ``count`` text files of simple sentences and return their folder."""
    chooser = random.Random(seed)
    names, verbs, things = ("Ada", "Ben", "Cleo", "Dan"), ("sees", "takes", "paints"), ("a boat", "the hill", "one key")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        sentences = [f"{chooser.choice(names)} {chooser.choice(verbs)} {chooser.choice(things)}." for _ in range(60)]
        (folder / f"{number:03d}.txt").write_text(f"Story {number}. " + " ".join(sentences), encoding="utf-8")
    return folder


def interrupt() -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


class InterruptAfter(ProgressBar):
    """Ends a preparation once so many shards are encoded; give it to `prepare` as ``progress``."""

    def __init__(self, shards: int, end: Callable[[], None] = interrupt) -> None:
        super().__init__()
        self.left, self.end = shards, end

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Count."""
        self.left -= self.what == "encoding"
        if self.left == 0:
            self.end()


def small_corpus(folder: Path, count: int = 40) -> Corpus:
    """Prepare the documents as bytes, in a cache inside ``folder``."""
    documents = write_documents(folder / "documents", count)
    return prepare([documents], vocab_size=257, val_fraction=0.2, test_fraction=0.2, cache_dir=folder / "cache", **FEW)
