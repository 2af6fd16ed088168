"""Token files: one flat array of ids with its metadata beside it, written aside and renamed when whole."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from geonorm.data.encode import Encoder
from geonorm.data.raw import read_object
from geonorm.data.tokenizer import EOS
from geonorm.errors import UserError
from geonorm.storage import sha256, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from typing_extensions import Self

_FORMAT = 1


class TokenFile:
    """A token file opened for reading; nothing is loaded until it is indexed.

    Attributes:
        path: the file with the ids.
        metadata: the JSON object stored beside it (``dtype``, ``num_tokens``, ``num_documents``, ``num_bytes``,
            ``skipped_documents``, ``vocab_size``, ``eos_id``, ``sha256`` of the ids; where some ids have no label
            ``num_labels`` and ``mask_sha256`` as well).
        dtype: ``uint16`` or ``uint32``, little-endian.
        num_tokens: number of ids.
        tokens: read-only memory map ``[num_tokens]``.
        mask: read-only memory map bool ``[num_tokens]``, whether an id has a label; None if all have, and then there is
            no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a token file.

        Raises:
            UserError: a missing file or metadata, unknown metadata, or a size or a mask that disagrees with it.
        """
        self.path = Path(path)
        self.metadata: dict[str, Any] = _read_metadata(self.path)
        self.dtype = np.dtype(self.metadata["dtype"])
        self.num_tokens = int(self.metadata["num_tokens"])
        expected = self.num_tokens * self.dtype.itemsize
        actual = self.path.stat().st_size
        if actual != expected:
            raise UserError(
                f"{self.path} has {actual} bytes but its metadata says {self.num_tokens} tokens of"
                f" {self.dtype.itemsize} bytes ({expected}); delete its folder and prepare the data again"
            )
        self.tokens: np.ndarray = np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))
        self.mask = self._open_mask() if "mask_sha256" in self.metadata else None

    def _open_mask(self) -> np.ndarray:
        path = _mask_path(self.path)
        # All of it is read by whoever cuts windows, and a wrong one would train on what it should not.
        if not path.is_file() or sha256(path) != self.metadata["mask_sha256"]:
            raise UserError(
                f"{path} is missing or not what was prepared (its SHA-256 differs); delete its folder and prepare the"
                " data again"
            )
        return np.memmap(path, dtype=bool, mode="r", shape=(self.num_tokens,))

    @property
    def num_labels(self) -> int:
        """Number of ids that have a label."""
        return int(self.metadata.get("num_labels", self.num_tokens))

    @property
    def identity(self) -> str:
        """What makes two token files the same: digests of the ids and, where there is one, of the mask."""
        return "+".join(str(self.metadata[name]) for name in ("sha256", "mask_sha256") if name in self.metadata)

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, num_tokens={self.num_tokens}, dtype={self.dtype.name})"

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        # A memory map would be sent by value; the receiving process opens the file instead.
        return TokenFile, (self.path,)


class TokenWriter:
    """Writes a token file; use it as a context manager.

    The file appears under its name when the block ends without an exception, and not at all otherwise. A mask with one
    byte an id lies beside it where an id has no label.

    Attributes:
        num_documents: documents written; whoever writes ids counts them here.
        num_bytes: UTF-8 bytes of those documents, end-of-text tokens not counted; likewise.
        num_tokens: ids written.
        num_labels: those of them that have a label.
        skipped: documents left out; counted by whoever leaves them out.
    """

    def __init__(self, path: str | os.PathLike[str], encoder: Encoder) -> None:
        """Start a file of ids of ``encoder`` at ``path``; metadata goes beside it with the suffix ``.json``."""
        self.path, self.encoder = Path(path), encoder
        self.num_documents = self.num_bytes = self.num_tokens = self.num_labels = self.skipped = 0
        self._digest, self._mask_digest = hashlib.sha256(), hashlib.sha256()
        self._partial, self._mask_partial = (
            name.with_name(f"{name.name}.{os.getpid()}.partial") for name in (self.path, _mask_path(self.path))
        )
        self._mask: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for file in filter(None, (self._file, self._mask)):
                    file.flush()
                    os.fsync(file.fileno())
                self._publish()
        finally:
            for file, partial in ((self._file, self._partial), (self._mask, self._mask_partial)):
                if file is not None:
                    file.close()
                partial.unlink(missing_ok=True)

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append ids, an array ``[n]`` of the encoder's dtype; ``mask``, bool ``[n]``, says which have a label."""
        if mask is not None and self._mask is None and not mask.all():
            self._mask = self._mask_partial.open("wb")
            self._write_mask(np.ones(self.num_tokens, dtype=bool))
        if self._mask is not None:
            self._write_mask(np.ones(len(ids), dtype=bool) if mask is None else mask)
        data = ids.tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.num_tokens += len(ids)
        self.num_labels += len(ids) if mask is None else int(np.count_nonzero(mask))

    def _write_mask(self, mask: np.ndarray) -> None:
        assert self._mask is not None
        data = mask.tobytes()
        self._mask_digest.update(data)
        self._mask.write(data)

    def _publish(self) -> None:
        if not self.num_tokens:
            raise UserError(f"no document with text to write to {self.path}; give files that have text in them")
        metadata = {
            "format": _FORMAT,
            "dtype": self.encoder.dtype.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "skipped_documents": self.skipped,
            "vocab_size": self.encoder.vocab_size,
            "eos_id": self.encoder.eos_id,
            "sha256": self._digest.hexdigest(),
        }
        # Old metadata beside new ids, or the reverse, must never be readable as a pair.
        _metadata_path(self.path).unlink(missing_ok=True)
        _mask_path(self.path).unlink(missing_ok=True)
        if self._mask is not None:
            metadata |= {"num_labels": self.num_labels, "mask_sha256": self._mask_digest.hexdigest()}
            self._mask.close()
            os.replace(self._mask_partial, _mask_path(self.path))
        self._file.close()
        os.replace(self._partial, self.path)
        write_json(_metadata_path(self.path), metadata)


def write_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, path: str | os.PathLike[str], eos: str = EOS
) -> TokenFile:
    """Encode documents into a token file and open it.

    Exactly one end-of-text id follows each document. Blank documents, and those that `Encoder.encode` cannot tell
    apart, are skipped and counted. Memory does not grow with the number of documents.

    Args:
        documents: texts.
        tokenizer: any tokenizer with an end-of-text token, used as `Encoder` says.
        path: where the ids go; metadata goes beside it with the suffix ``.json``.
        eos: spelling of the end-of-text token.

    Raises:
        UserError: a tokenizer without the end-of-text token, or no document with text.
    """
    encoder = Encoder(tokenizer, eos)
    with TokenWriter(path, encoder) as writer:

        def usable() -> Iterable[str]:
            for text in documents:
                if text.strip():
                    yield text
                else:
                    writer.skipped += 1

        texts, to_encode = itertools.tee(usable())
        for text, found in zip(texts, encoder.encode(to_encode), strict=True):
            if found is None:
                writer.skipped += 1
                continue
            writer.write(*found)
            writer.num_documents += 1
            writer.num_bytes += len(text.encode("utf-8"))
    return TokenFile(path)


def _metadata_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _mask_path(path: Path) -> Path:
    """Such as train.mask beside train.tokens."""
    return path.with_suffix(".mask")


def _read_metadata(path: Path) -> dict[str, Any]:
    beside = _metadata_path(path)
    for needed in (path, beside):
        if not needed.is_file():
            raise UserError(f"no such token file: {needed}; prepare the data again")
    metadata = read_object(beside) or {}
    known = metadata.get("format") == _FORMAT and metadata.get("dtype") in ("<u2", "<u4")
    if not (known and isinstance(metadata.get("num_tokens"), int) and metadata["num_tokens"] > 0):
        raise UserError(f"{beside} is not metadata of a token file; delete its folder and prepare the data again")
    return metadata
