"""A corpus on a machine that does not see the folder it lies in: sent once, in pieces, and kept in the cache there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from geonorm.data import Corpus, cache_folder
from geonorm.errors import UserError

PIECE_BYTES = 32 << 20
_FOLDER = "received"


@dataclasses.dataclass(frozen=True)
class CorpusOffer:
    """Where a trial finds its corpus.

    Attributes:
        path: folder on the machine that prepared it, and elsewhere too where the file system is shared.
        key: digest of its content, see :func:`corpus_key`.
        pieces: name of each file with references to its pieces; None until a machine asks for them.
    """

    path: str
    key: str
    pieces: tuple[tuple[str, tuple[Any, ...]], ...] | None = None


def corpus_files(folder: Path) -> list[Path]:
    """Files of a prepared corpus, by name."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def corpus_key(folder: Path) -> str | None:
    """Digest of a prepared corpus; None if the folder holds none.

    It is taken over the small files, which hold digests of the token files, and over all names and sizes.
    """
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in corpus_files(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def read_pieces(path: Path) -> Iterator[bytes]:
    """Content of a file in pieces of :data:`PIECE_BYTES`."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    for piece in read_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def find_corpus(offer: CorpusOffer, fetch: Callable[[Any], bytes]) -> Path | None:
    """Folder of the corpus on this machine, received if need be; None if it is not here and no pieces are offered.

    One process of a machine receives, others wait for it; a broken transfer leaves nothing that looks whole.

    Args:
        offer: see :class:`CorpusOffer`.
        fetch: gives the bytes of one piece.

    Raises:
        UserError: what arrived is not what was offered.
    """
    given = Path(offer.path)
    if corpus_key(given) == offer.key:
        return given
    cache = cache_folder() / _FOLDER
    final = cache / offer.key
    if final.is_dir():
        return final
    if offer.pieces is None:
        return None
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{offer.key}.lock"):
        if not final.is_dir():
            _receive(offer, final, fetch)
    return final


def _receive(offer: CorpusOffer, final: Path, fetch: Callable[[Any], bytes]) -> None:
    assert offer.pieces is not None
    partial = Path(tempfile.mkdtemp(prefix=f"{offer.key}.", suffix=".partial", dir=final.parent))
    try:
        for name, references in offer.pieces:
            with (partial / name).open("wb") as file:
                for reference in references:
                    file.write(fetch(reference))
                file.flush()
                os.fsync(file.fileno())
        corpus = Corpus.load(partial)
        whole = all(sha256_of(side.path) == side.metadata["sha256"] for side in (corpus.train, corpus.val, corpus.test))
        if corpus_key(partial) != offer.key or not whole:
            raise UserError(f"the corpus arrived damaged in {final.parent}; run the command again with --resume")
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
