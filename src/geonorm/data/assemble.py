"""Encoded shards to the two token files of a corpus, each document on the side that its content decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from geonorm.data.corpus import TOKEN_FILES
from geonorm.data.encode import Encoder
from geonorm.data.packed import IdWriter
from geonorm.data.shards import ShardFacts, read_ids, read_index
from geonorm.data.split import TRAIN, VAL, Split, Survey


@dataclasses.dataclass(frozen=True)
class Side:
    """Counts of one side of a corpus."""

    num_documents: int
    num_bytes: int
    num_tokens: int


def survey_shards(folder: Path, shards: Sequence[ShardFacts]) -> Survey:
    """Survey the documents that became ids, in their order."""
    survey = Survey()
    for shard in shards:
        index = read_index(folder, shard.number)
        kept = index[index["num_tokens"] > 0]
        for digest, size in zip(kept["digest"], kept["num_bytes"].tolist(), strict=True):
            survey.add_digest(digest.tobytes(), size)
    return survey


def assemble(
    folder: Path, shards: Sequence[ShardFacts], split: Split, encoder: Encoder, target: Path
) -> dict[str, Side]:
    """Copy the ids of all shards into the token files in ``target``; one shard is in memory at a time."""
    files = {side: target / name for side, name in TOKEN_FILES.items()}
    dtype, vocab_size, eos_id = encoder.dtype, encoder.vocab_size, encoder.eos_id
    with (
        IdWriter(files[TRAIN], dtype, vocab_size, eos_id) as train,
        IdWriter(files[VAL], dtype, vocab_size, eos_id) as val,
    ):
        for shard in shards:
            index = read_index(folder, shard.number)
            index = index[index["num_tokens"] > 0]
            ids = read_ids(folder, shard.number, dtype)
            held_out = np.fromiter((split.side_of(row.tobytes()) == VAL for row in index["digest"]), bool, len(index))
            ends = np.cumsum(index["num_tokens"])
            for writer, mine in ((train, ~held_out), (val, held_out)):
                for first, last in _runs(mine):
                    start = int(ends[first - 1]) if first else 0
                    writer.write(ids[start : int(ends[last - 1])])
                writer.num_documents += int(mine.sum())
                writer.num_bytes += int(index["num_bytes"][mine].sum())
    return {side: Side(w.num_documents, w.num_bytes, w.num_tokens) for side, w in ((TRAIN, train), (VAL, val))}


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
