"""Documents to shards of ids: files that worker processes write and that survive a kill.

`datasets.map` in their place kept nothing when it was killed in the middle, and its worker processes lived on; see
docs/data.md.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.data.encode import Encoder
from geonorm.data.records import Document
from geonorm.data.split import document_digest, num_bytes, side_key
from geonorm.data.tokenizer import load_tokenizer, token_byte_lengths
from geonorm.errors import UserError

SHARD_CHARACTERS = 8_000_000

# One row a document: its `document_digest`, what decides its side, its size, how many ids it became (0 where it is left
# out), the bytes that these stand for, and how many of them stand for what the tokenizer cannot spell.
_SUMMED = ("num_bytes", "num_tokens", "num_spelled", "num_unknown")
INDEX = np.dtype([("digest", "u1", 32), ("key", "<u8"), *((name, "<i8") for name in _SUMMED)])
_VERSION = 4


def shard_texts(documents: Iterable[str]) -> Iterator[list[str]]:
    """Gather documents, in order, into lists of at least `SHARD_CHARACTERS` characters; the last may have fewer.

    Where the lists end depends on the documents alone, never on who encodes them.
    """
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= SHARD_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


class Shards:
    """Shards in a folder, numbered from 0; one is in memory at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, number: int, index: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> None:
        """Keep a shard; its file is there once it is whole.

        Args:
            number: its place.
            index: `INDEX`, one row a document.
            ids: of these documents one after another.
            mask: bool, which of the ids have a label; empty if all have.
        """
        partial = self._path(number).with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, version=np.array(_version()), index=index, ids=ids, mask=mask)
        partial.replace(self._path(number))

    def read(self, number: int, *names: str) -> list[np.ndarray]:
        """Arrays of a shard by their names in `write`; checksums of the file are checked."""
        with np.load(self._path(number), allow_pickle=False) as found:
            return [found[name] for name in names]

    def finished(self, number: int, texts: list[str]) -> Counter[str] | None:
        """`shard_counts` of a whole shard that holds exactly these documents; None if it has to be made."""
        try:
            version, index, *_ = self.read(number, "version", "index", "ids", "mask")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        digests = b"".join(map(document_digest, texts))
        right = str(version) == _version() and index["digest"].tobytes() == digests
        return shard_counts(index) if right else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"


def shard_counts(index: np.ndarray) -> Counter[str]:
    """Sums over the documents of an `INDEX`, their number and that of documents left out, which are in no other sum."""
    kept = index[index["num_tokens"] > 0]
    sums = {name: int(kept[name].sum()) for name in _SUMMED}
    return Counter(num_documents=len(kept), num_left_out=len(index) - len(kept), **sums)


class ShardEncoder:
    """Encodes lists of documents into shards; one lives in each worker process."""

    def __init__(self, folder: Path, tokenizer_path: Path, eos: str) -> None:
        tokenizer = load_tokenizer(tokenizer_path)
        self.shards = Shards(folder)
        self.encoder = Encoder(tokenizer, eos)
        self.lengths = token_byte_lengths(tokenizer)
        # Where the spelling of a special token stands for it, it counts as well.
        self.spelled_lengths = self.lengths.copy()
        for number, token in tokenizer.get_added_tokens_decoder().items():
            if token.special:
                self.spelled_lengths[number] = len(token.content.encode("utf-8"))

    def __call__(self, number: int, texts: list[str]) -> Counter[str]:
        """Encode the documents and write shard ``number``; returns its `shard_counts`."""
        index = np.zeros(len(texts), dtype=INDEX)
        ids, masks = [np.zeros(0, dtype=self.encoder.dtype)], [np.zeros(0, dtype=bool)]
        for row, text, found in zip(index, texts, self.encoder.encode(texts), strict=True):
            row["digest"] = np.frombuffer(document_digest(text), dtype=np.uint8)
            row["key"], row["num_bytes"] = side_key(text), num_bytes(text)
            if found is None:
                continue
            ids.append(found.ids)
            masks.append(np.ones(len(found.ids), dtype=bool) if found.mask is None else found.mask)
            lengths = self.spelled_lengths if isinstance(text, Document) and text.special else self.lengths
            row["num_tokens"], row["num_spelled"] = len(found.ids), lengths[found.ids[:-1]].sum()
            if self.encoder.unknown_id is not None:
                row["num_unknown"] = (found.ids == self.encoder.unknown_id).sum()
        mask = np.concatenate(masks)
        self.shards.write(number, index, np.concatenate(ids), mask[:0] if mask.all() else mask)
        return shard_counts(index)


def encode_shards(
    encoder: tuple[Any, ...], tasks: Iterator[tuple[int, list[str]]], workers: int
) -> Iterator[Counter[str]]:
    """Encode lists of documents into shards; yields their `shard_counts` in the order in which they end.

    At most ``workers + 1`` lists are taken ahead of their results, so that a fast reader does not fill the memory. One
    worker, or a single list, is encoded in this process.

    Args:
        encoder: arguments of `ShardEncoder`, which is made once in each process.
        tasks: number and documents of each shard.
        workers: number of processes, at least 1.

    Raises:
        UserError: a worker process died.
    """
    ahead = list(itertools.islice(tasks, 2)) if workers > 1 else []
    alone = len(ahead) < 2
    tasks = itertools.chain(ahead, tasks)
    del ahead
    if alone:
        encode = ShardEncoder(*encoder)
        for task in tasks:
            yield encode(*task)
        return
    pool = ProcessPoolExecutor(workers, _context(), _start, encoder)
    waiting: set[Future[Counter[str]]] = set()
    try:
        for task in tasks:
            waiting.add(pool.submit(_run, *task))
            if len(waiting) > workers:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)
        yield from (future.result() for future in as_completed(waiting))
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed or could not start; if memory ran out use fewer `workers`, and in a script"
            " call prepare under `if __name__ == '__main__':` (finished shards are kept)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encode: Callable[..., Counter[str]]


def _start(*encoder: Any) -> None:
    global _encode
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The processes are the parallelism; threads in each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode = ShardEncoder(*encoder)


def _run(number: int, texts: list[str]) -> Counter[str]:
    return _encode(number, texts)


def _context() -> BaseContext:
    # Forking this process, which holds threads of tokenizers, torch or pyarrow, can lock up. A server that has only
    # imported this module is safe to fork, and the package is then imported once and not once a worker.
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _end_with_parent() -> None:
    # A killed parent cannot close the queue, and the worker would wait on it for ever.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _version() -> str:
    import tokenizers

    return f"{_VERSION} tokenizers {tokenizers.__version__}"
