"""How much of a held-out text stands in the training text as well, by n-grams of token ids."""

from __future__ import annotations

import numpy as np

from geonorm.data.packed import TokenFile

NGRAM = 32
_CHUNK = 1 << 22
_TABLE_BITS = 26


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
        hashes = _mixed(hashes[:-width] * np.uint64(0x9E3779B97F4A7C15) + hashes[width:])
        ends = ends[:-width] | ends[width:]
        width *= 2
    return hashes, ~ends


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, so that every bit of a hash depends on every bit of its input."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
