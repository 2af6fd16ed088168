"""Text that stands twice in a corpus: copies and near-duplicates among its documents, runs of tokens on two sides.

Near-duplicates are found with MinHash by `datasketch`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from geonorm.data.split import normalized, text_key
from geonorm.data.token_file import TokenFile

if TYPE_CHECKING:
    from datasketch import MinHash

SHINGLE_WORDS = 5
THRESHOLD = 0.7
_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

NGRAM = 32
_CHUNK = 1 << 22
_TABLE_BITS = 26


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


def overlap(train: TokenFile, held_out: TokenFile, ngram: int = NGRAM) -> float:
    """Share of the held-out tokens that lie in an n-gram of tokens which occurs in ``train`` too.

    Tokens without a label are not counted, because they are not scored, but their n-grams are looked for.
    N-grams that reach over the end of a document do not count. Two n-grams are taken for equal if 64 bits of hash are.
    Memory follows the held-out side: about 30 bytes a token of it and 64 MB.

    Args:
        train: the training side.
        held_out: a held-out side of the same corpus.
        ngram: tokens of an n-gram, a power of 2.
    """
    eos = int(held_out.metadata["eos_id"])
    hashes, valid = _hashes(held_out.tokens[:], ngram, eos)
    if not valid.any():
        return 0.0
    wanted = np.unique(hashes[valid])
    found = np.zeros(len(wanted), dtype=bool)
    # Most n-grams of the training side are turned away here, which is much cheaper than looking each of them up.
    table = np.zeros(1 << _TABLE_BITS, dtype=bool)
    table[wanted >> np.uint64(64 - _TABLE_BITS)] = True
    for start in range(0, train.num_tokens, _CHUNK):
        theirs, usable = _hashes(train.tokens[start : start + _CHUNK + ngram - 1], ngram, eos)
        theirs = theirs[usable]
        theirs = theirs[table[theirs >> np.uint64(64 - _TABLE_BITS)]]
        place = np.searchsorted(wanted, theirs)
        place[place == len(wanted)] = 0
        found[place[wanted[place] == theirs]] = True
    hit = valid & found[np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)]
    edges = np.zeros(held_out.num_tokens + 1, dtype=np.int64)
    starts = np.flatnonzero(hit)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + ngram, -1)
    inside = np.cumsum(edges[:-1]) > 0
    return float((inside if held_out.mask is None else inside[held_out.mask]).mean())


def _hashes(tokens: np.ndarray, ngram: int, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash of the n-gram at each place, uint64 ``[num_tokens - ngram + 1]``, and whether it lies in one document."""
    if len(tokens) < ngram:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=bool)
    hashes = _mixed(tokens.astype(np.uint64) + np.uint64(1))
    ends = (tokens == eos).astype(bool)
    width = 1
    while width < ngram:
        hashes = _mixed(hashes[:-width] * _MULTIPLIER + hashes[width:])
        ends = ends[:-width] | ends[width:]
        width *= 2
    return hashes, ~ends


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, so that every bit of a hash depends on every bit of its input."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _shingles(text: str) -> list[int]:
    words = _WORD.findall(normalized(text))
    hashes = {
        word: int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "big")
        for word in set(words)
    }
    ids = np.array([hashes[word] for word in words] or [0], dtype=np.uint64)
    mixed = ids.copy()
    for offset in range(1, min(SHINGLE_WORDS, len(ids))):
        mixed = mixed[:-1] * _MULTIPLIER + ids[offset:]
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed & np.uint64(0xFFFFFFFF)).tolist()
