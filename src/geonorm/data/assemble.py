"""Encoded shards to the token files of a corpus, each document on the side that its content or group decides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from geonorm.data.corpus import GROUP_FILES, TOKEN_FILES
from geonorm.data.encode import Encoder
from geonorm.data.packed import IdWriter
from geonorm.data.shards import ShardFacts, read_ids, read_index, read_mask
from geonorm.data.split import SIDES, Split, Survey


@dataclasses.dataclass(frozen=True)
class Side:
    """Counts of one side of a corpus.

    Attributes:
        num_groups: groups that its documents belong to; copies of one document are one where none are named.
        largest_share: share of its tokens that the largest group has.
        num_labels: tokens that have a label.
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_groups: int
    largest_share: float
    num_labels: int


def survey_shards(folder: Path, shards: Sequence[ShardFacts]) -> Survey:
    """Survey the documents that became ids, in their order."""
    survey = Survey()
    for shard in shards:
        index = read_index(folder, shard.number)
        kept = index[index["num_tokens"] > 0]
        for digest, key, size in zip(kept["digest"], kept["key"].tolist(), kept["num_bytes"].tolist(), strict=True):
            survey.add_digest(digest.tobytes(), key, size)
    return survey


def assemble(
    folder: Path, shards: Sequence[ShardFacts], split: Split, encoder: Encoder, target: Path
) -> dict[str, Side]:
    """Copy the ids of all shards into the token files in ``target``; one shard is in memory at a time."""
    facts = encoder.dtype, encoder.vocab_size, encoder.eos_id
    rows: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        writers = {side: stack.enter_context(IdWriter(target / TOKEN_FILES[side], *facts)) for side in SIDES}
        for shard in shards:
            index = read_index(folder, shard.number)
            index = index[index["num_tokens"] > 0]
            ids, mask = read_ids(folder, shard.number, encoder.dtype), read_mask(folder, shard)
            sides = np.array([SIDES.index(split.side_of(key)) for key in index["key"].tolist()], dtype=np.int64)
            ends = np.cumsum(index["num_tokens"])
            for number, (side, writer) in enumerate(writers.items()):
                mine = sides == number
                for first, last in _runs(mine):
                    start = int(ends[first - 1]) if first else 0
                    stop = int(ends[last - 1])
                    writer.write(ids[start:stop], None if mask is None else mask[start:stop])
                writer.num_documents += int(mine.sum())
                writer.num_bytes += int(index["num_bytes"][mine].sum())
                rows[side].append(index[["key", "num_tokens"]][mine])
    return {side: _side(side, writers[side], np.concatenate(rows[side]), target) for side in SIDES}


def _side(side: str, writer: IdWriter, rows: np.ndarray, target: Path) -> Side:
    keys, groups = np.unique(rows["key"], return_inverse=True)
    if side in GROUP_FILES:
        np.save(target / GROUP_FILES[side], groups.astype(np.int32), allow_pickle=False)
    tokens = np.bincount(groups, weights=rows["num_tokens"])
    share = float(tokens.max() / tokens.sum())
    return Side(writer.num_documents, writer.num_bytes, writer.num_tokens, len(keys), share, writer.num_labels)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
