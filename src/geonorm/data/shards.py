"""Encoded shards: pieces of a corpus that worker processes write and that survive a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.data.document import Document
from geonorm.data.encode import Encoder
from geonorm.data.split import document_digest, side_key
from geonorm.data.tokenizer import load_tokenizer, token_byte_lengths
from geonorm.storage import write_json

SHARD_CHARACTERS = 8_000_000
NO_TOKEN = "document that does not encode"

# One row a document: its `document_digest`, what decides its side, its size, the ids it became (0 where left out).
INDEX = np.dtype([("digest", "u1", 32), ("key", "<u8"), ("num_bytes", "<i8"), ("num_tokens", "<i8")])


@dataclasses.dataclass(frozen=True)
class ShardFacts:
    """What is known of a finished shard; counts are of the documents that became ids."""

    number: int
    num_documents: int
    num_bytes: int
    num_tokens: int
    num_spelled_bytes: int
    num_unknown: int
    skipped: int
    input: str
    tokens_sha256: str
    index_sha256: str
    mask_sha256: str | None
    version: str


def group(documents: Iterable[str], characters: int = SHARD_CHARACTERS) -> Iterator[list[str]]:
    """Gather documents, in order, into lists of at least ``characters`` characters; the last may have fewer.

    Where the lists end depends on the documents alone, never on who encodes them.
    """
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= characters:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def finished(folder: Path, number: int, texts: list[str]) -> ShardFacts | None:
    """Facts of shard ``number`` if it was made of these very documents and its files are undamaged, else None."""
    try:
        facts = ShardFacts(**json.loads(_path(folder, number, "json").read_text(encoding="utf-8")))
        right = facts.version == _version() and facts.input == _input(document_digest(text) for text in texts)
        right = right and facts.tokens_sha256 == _sha256(_path(folder, number, "ids").read_bytes())
        if facts.mask_sha256 is not None:
            right = right and facts.mask_sha256 == _sha256(_path(folder, number, "mask").read_bytes())
        right = right and facts.index_sha256 == _sha256(_path(folder, number, "index").read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    return facts if right else None


def read_index(folder: Path, number: int) -> np.ndarray:
    """The rows of a finished shard, dtype `INDEX`."""
    return np.fromfile(_path(folder, number, "index"), dtype=INDEX)


def read_ids(folder: Path, number: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The ids of a finished shard, the documents one after another."""
    return np.fromfile(_path(folder, number, "ids"), dtype=dtype)


def read_mask(folder: Path, facts: ShardFacts) -> np.ndarray | None:
    """Whether each id of a finished shard has a label, bool; None if all have."""
    return None if facts.mask_sha256 is None else np.fromfile(_path(folder, facts.number, "mask"), dtype=bool)


class ShardEncoder:
    """Encodes lists of documents into shards; one lives in each worker process."""

    def __init__(self, folder: Path, tokenizer_path: Path, eos: str) -> None:
        tokenizer = load_tokenizer(tokenizer_path)
        self.folder = folder
        self.encoder = Encoder(tokenizer, eos)
        self.lengths = token_byte_lengths(tokenizer)
        self.special_lengths = np.zeros_like(self.lengths)
        for number, token in tokenizer.get_added_tokens_decoder().items():
            if token.special:
                self.special_lengths[number] = len(token.content.encode("utf-8"))

    def __call__(self, number: int, texts: list[str]) -> ShardFacts:
        """Encode the documents and write shard ``number``; it counts as finished once its JSON file is there."""
        index = np.zeros(len(texts), dtype=INDEX)
        counts: Counter[str] = Counter()
        written = hashlib.sha256()
        # For every id of the shard, once a document of it has a mask.
        masks: list[np.ndarray] | None = None
        _path(self.folder, number, "json").unlink(missing_ok=True)
        with _path(self.folder, number, "ids").open("wb") as file:
            for row, (text, found) in enumerate(zip(texts, self.encoder.encode(texts), strict=True)):
                data = text.encode("utf-8")
                index[row]["digest"] = np.frombuffer(document_digest(text), dtype=np.uint8)
                index[row]["key"] = side_key(text)
                index[row]["num_bytes"] = len(data)
                if found is None:
                    counts["skipped"] += 1
                    continue
                ids, mask = found
                if mask is not None and masks is None:
                    masks = [np.ones(counts["tokens"], dtype=bool)]
                if masks is not None:
                    masks.append(np.ones(len(ids), dtype=bool) if mask is None else mask)
                index[row]["num_tokens"] = len(ids)
                written.update(ids.tobytes())
                file.write(ids.tobytes())
                counts["documents"] += 1
                counts["bytes"] += len(data)
                counts["tokens"] += len(ids)
                counts["spelled"] += int(self.lengths[ids[:-1]].sum())
                if isinstance(text, Document) and text.special:
                    counts["spelled"] += int(self.special_lengths[ids[:-1]].sum())
                if self.encoder.unknown_id is not None:
                    counts["unknown"] += int((ids == self.encoder.unknown_id).sum())
            file.flush()
            os.fsync(file.fileno())
        mask_sha256 = None
        if masks is not None:
            _path(self.folder, number, "mask").write_bytes(data := np.concatenate(masks).tobytes())
            mask_sha256 = _sha256(data)
        rows = index.tobytes()
        _path(self.folder, number, "index").write_bytes(rows)
        facts = ShardFacts(
            number=number,
            num_documents=counts["documents"],
            num_bytes=counts["bytes"],
            num_tokens=counts["tokens"],
            num_spelled_bytes=counts["spelled"],
            num_unknown=counts["unknown"],
            skipped=counts["skipped"],
            input=_input(row["digest"].tobytes() for row in index),
            tokens_sha256=written.hexdigest(),
            index_sha256=_sha256(rows),
            mask_sha256=mask_sha256,
            version=_version(),
        )
        write_json(_path(self.folder, number, "json"), dataclasses.asdict(facts))
        return facts


def _path(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"{number:06d}.{suffix}"


def _version() -> str:
    import tokenizers

    return f"3 tokenizers {tokenizers.__version__}"


def _input(digests: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
