"""Documents that repeat an earlier one, to the letter or nearly; the latter found with MinHash by `datasketch`."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from geonorm.data.split import normalized, text_key

if TYPE_CHECKING:
    from datasketch import MinHash

SHINGLE_WORDS = 5
THRESHOLD = 0.7
_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")


class Deduplication:
    """Leaves out documents that repeat an earlier one.

    ``"exact"`` compares normalised texts. ``"near"`` leaves out as well whose sets of runs of five words share an
    estimated 0.7 of their union with those of an earlier document. The estimate comes from 128 permutations, so pairs
    within about 0.08 of the limit go either way; the same documents in the same order always get the same answer.
    Memory grows with the number of documents kept: about 100 bytes each, 4 kB each for ``"near"``.
    """

    def __init__(self, kind: str | None) -> None:
        """Start; None leaves out nothing."""
        self.kind = kind
        self._near: set[int] | None = None

    def distinct(self, documents: Iterable[str], skipped: Counter[str]) -> Iterator[str]:
        """Yield the documents but the repeats, which are counted; it may be called again with the same documents."""
        if self.kind is None:
            yield from documents
            return
        copies: set[int] = set()
        known, near = self._near, set[int]()
        sketches = _Sketches() if self.kind == "near" and known is None else None
        for number, text in enumerate(documents):
            key = text_key(text)
            if key in copies:
                skipped["copy of an earlier document"] += 1
                continue
            copies.add(key)
            if number in known if known is not None else sketches is not None and sketches.has_like(text):
                near.add(number)
                skipped["near-duplicate of an earlier document"] += 1
                continue
            yield text
        # Sketches take most of the time, so the answers of a whole pass serve the next one.
        self._near = near


class _Sketches:
    def __init__(self) -> None:
        from datasketch import MinHashLSH

        # Candidates are checked, so that it is worse to miss one than to have one too many.
        self._index = MinHashLSH(threshold=THRESHOLD, num_perm=_PERMUTATIONS, weights=(0.1, 0.9))
        self._sketches: list[MinHash] = []

    def has_like(self, text: str) -> bool:
        """Whether an earlier document is nearly this one; if not, this one is remembered."""
        from datasketch import MinHash

        sketch = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=int)
        sketch.update_batch(_shingles(text))
        candidates = cast("list[int]", self._index.query(sketch))
        if any(sketch.jaccard(self._sketches[number]) >= THRESHOLD for number in candidates):
            return True
        self._index.insert(len(self._sketches), sketch, check_duplication=False)
        self._sketches.append(sketch)
        return False


def _shingles(text: str) -> list[int]:
    words = _WORD.findall(normalized(text))
    hashes = {word: _word_hash(word) for word in set(words)}
    ids = np.array([hashes[word] for word in words] or [0], dtype=np.uint64)
    mixed = ids.copy()
    for offset in range(1, min(SHINGLE_WORDS, len(ids))):
        mixed = mixed[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[offset:]
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed & np.uint64(0xFFFFFFFF)).tolist()


def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "big")
