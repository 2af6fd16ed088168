"""From paths to a prepared corpus in the cache, built once per content and settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geonorm.data.corpus import DESCRIPTION, TOKEN_BYTES, TOKEN_FILES, TOKENIZER, Corpus
from geonorm.data.embedded import EmbeddedSource
from geonorm.data.packed import TokenWriter
from geonorm.data.sources import FileSource, Source
from geonorm.data.split import TRAIN, VAL, Split, Survey, sample_documents
from geonorm.data.tokenizer import check_vocab_size, token_byte_lengths, train_tokenizer
from geonorm.errors import UserError, check_count, check_positive
from geonorm.storage import write_json

TOKENIZER_SAMPLE_BYTES = 20_000_000
MAX_VAL_FRACTION = 0.5

# Part of the cache key: raise it when the same content and settings would give other tokens.
_FORMAT = 1
_REPORT_EVERY = 50_000_000

Report = Callable[[str], None]


def prepare(
    paths: Sequence[str | os.PathLike[str]] | None = None,
    vocab_size: int = 2048,
    val_fraction: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
    max_documents: int | None = None,
    report: Report | None = None,
    text_column: str = "text",
) -> Corpus:
    """Read text, split it by document, train a tokenizer on the train side and pack both sides into token files.

    The result lies in the cache under a key of the content and the settings; a second call with the same ones opens
    it. An interrupted call leaves nothing that looks whole, and calls may run at the same time.

    Args:
        paths: files and folders, see `geonorm.data.sources.FileSource`; None for the embedded corpus.
        vocab_size: wanted vocabulary, at least 257; a small corpus may yield fewer ids.
        val_fraction: wanted share of validation bytes, above 0 and at most 0.5. Documents are never cut, so the
            share is near to it rather than equal; a corpus of one document is cut at a line break.
        cache_dir: where prepared corpora are kept; ``$GEONORM_CACHE`` or ``~/.cache/geonorm`` if None.
        max_documents: read only the first so many documents that have text.
        report: called with one line of text at each stage.
        text_column: the column of JSON and Parquet files that holds the text.

    Raises:
        UserError: a path, file, record or setting that cannot be used.
    """
    check_vocab_size(vocab_size)
    val_fraction = check_positive("val_fraction", val_fraction)
    if val_fraction > MAX_VAL_FRACTION:
        raise UserError(f"`val_fraction` must be at most {MAX_VAL_FRACTION}, got {val_fraction}")
    if max_documents is not None:
        check_count("max_documents", max_documents)
    say = report or (lambda line: None)
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    source: Source = EmbeddedSource() if paths is None else FileSource(paths, text_column)
    settings = {"vocab_size": vocab_size, "val_fraction": val_fraction, "max_documents": max_documents}
    identity = {"format": _FORMAT, "content": source.fingerprint(), **settings}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]

    cache = _cache_folder(cache_dir)
    final = cache / key
    if not final.exists():
        with _building(cache, key) as folder:
            if folder is not None:
                say(f"preparing {', '.join(_shortened(source.names))}")
                _build(folder, source, settings, say)
    corpus = Corpus.load(final)
    say(_summary(corpus))
    return corpus


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    folder = Path(cache_dir or os.environ.get("GEONORM_CACHE") or Path.home() / ".cache" / "geonorm").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder} ({error.strerror}); set `cache_dir` or GEONORM_CACHE"
        ) from error
    return folder


@contextlib.contextmanager
def _building(cache: Path, key: str) -> Iterator[Path | None]:
    """A folder to build in, renamed to its final name when the block ends well; None if it was built meanwhile."""
    from filelock import FileLock

    final, prefix = cache / key, f".building-{key}-"
    with FileLock(cache / f".{key}.lock"):
        if final.exists():
            yield None
            return
        # Nobody else builds this key while the lock is held, so these were left by a process that was killed.
        for left in cache.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
        try:
            yield folder
            # mkdtemp makes folders private; a shared cache is readable as its parent is.
            folder.chmod(cache.stat().st_mode & 0o777)
            try:
                folder.rename(final)
            except OSError:
                # Where locks do not work (some network drives) another process can have won; its result is equal.
                if not (final / DESCRIPTION).exists():
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _build(folder: Path, source: Source, settings: dict[str, Any], say: Report) -> None:
    limit = settings["max_documents"]
    skipped: Counter[str] = Counter()
    survey = Survey()
    for text in _usable(source, limit, skipped):
        survey.add(text)
    if not survey.num_documents:
        why = ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "the files hold no records"
        raise UserError(f"no document with text in {', '.join(_shortened(source.names))} ({why}); give other files")
    split = survey.split(settings["val_fraction"])
    documents = survey.num_documents
    notes = []
    if split.cut_fraction is not None:
        share = f"{split.cut_fraction:.4g}"
        notes.append(
            f"The corpus is one document; about its last {share} is validation, cut at the nearest line break."
        )
        if documents > 1:
            skipped["repeat of the only document"] = documents - 1

    say(f"training a tokenizer on {documents} documents, {survey.num_bytes / 1e6:.1f} MB")
    train_side = (text for side, text in _sides(source, limit, split) if side == TRAIN)
    tokenizer = train_tokenizer(sample_documents(train_side, TOKENIZER_SAMPLE_BYTES), settings["vocab_size"])
    tokenizer.save(str(folder / TOKENIZER))
    lengths = token_byte_lengths(tokenizer)
    np.save(folder / TOKEN_BYTES, lengths, allow_pickle=False)

    again = Survey()
    with (
        TokenWriter(folder / TOKEN_FILES["train"], tokenizer) as train,
        TokenWriter(folder / TOKEN_FILES["val"], tokenizer) as val,
    ):
        reported = 0
        for side, text in _sides(source, limit, split, again):
            (train if side == TRAIN else val).add(text)
            if train.num_bytes + val.num_bytes >= reported + _REPORT_EVERY:
                reported = train.num_bytes + val.num_bytes
                say(f"encoded {reported / 1e6:.0f} of {survey.num_bytes / 1e6:.0f} MB")
    if again.fingerprint != survey.fingerprint:
        raise UserError(f"{', '.join(_shortened(source.names))} changed while being read; prepare the data again")

    writers = {"train": train, "val": val}
    num_bytes = train.num_bytes + val.num_bytes
    text_tokens = sum(writer.num_tokens - writer.num_documents for writer in writers.values())
    description = {
        "sources": source.names,
        "num_documents": {side: writer.num_documents for side, writer in writers.items()},
        "num_bytes": {side: writer.num_bytes for side, writer in writers.items()},
        "num_tokens": {side: writer.num_tokens for side, writer in writers.items()},
        "skipped": dict(sorted(skipped.items())),
        "bytes_per_token": num_bytes / text_tokens,
        "vocab_size": len(lengths),
        "eos_id": train.eos_id,
        "fingerprint": survey.fingerprint,
        "settings": settings,
        "notes": notes,
    }
    write_json(folder / DESCRIPTION, description)


def _usable(source: Source, limit: int | None, skipped: Counter[str]) -> Iterator[str]:
    taken = 0
    for text in source.documents(skipped):
        if not text.strip():
            skipped["blank document"] += 1
            continue
        yield text
        taken += 1
        if taken == limit:
            return


def _sides(source: Source, limit: int | None, split: Split, survey: Survey | None = None) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(_usable(source, limit, Counter())):
        if survey is not None:
            survey.add(text)
        if split.cut_fraction is None or number == 0:
            yield from split.parts(text)


def _shortened(names: list[str], most: int = 4) -> list[str]:
    return names if len(names) <= most else [*names[:most], f"{len(names) - most} more"]


def _summary(corpus: Corpus) -> str:
    facts = corpus.description
    return (
        f"{facts['num_tokens'][TRAIN]:,} train and {facts['num_tokens'][VAL]:,} validation tokens,"
        f" vocabulary {facts['vocab_size']}, {facts['bytes_per_token']:.2f} bytes per token, in {corpus.path}"
    )
