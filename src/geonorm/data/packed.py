"""Token files: one flat array of ids with its metadata beside it, written aside and renamed when whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.tokenizer import EOS, cut_pieces, eos_id, max_id
from geonorm.errors import UserError
from geonorm.storage import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT = 1
_BATCH_CHARACTERS = 1 << 20


def dtype_for(largest_id: int) -> np.dtype[Any]:
    """``uint16`` where every id up to ``largest_id`` fits, else ``uint32``; little-endian.

    Raises:
        UserError: a negative id or one beyond 32 bits.
    """
    if not 0 <= largest_id < 2**32:
        raise UserError(f"token id {largest_id} does not fit 32 bits; use a smaller vocabulary")
    return np.dtype("<u2") if largest_id < 2**16 else np.dtype("<u4")


class TokenFile:
    """A token file opened for reading; nothing is loaded until it is indexed.

    Attributes:
        path: the file with the ids.
        metadata: the JSON object stored beside it (``dtype``, ``num_tokens``, ``num_documents``, ``num_bytes``,
            ``skipped_documents``, ``vocab_size``, ``eos_id``, ``sha256`` of the ids).
        dtype: ``uint16`` or ``uint32``, little-endian.
        num_tokens: number of ids.
        tokens: read-only memory map ``[num_tokens]``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a token file.

        Raises:
            UserError: a missing file or metadata, unknown metadata, or a size that disagrees with the metadata.
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

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, num_tokens={self.num_tokens}, dtype={self.dtype.name})"

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        # A memory map would be sent by value; the receiving process opens the file instead.
        return TokenFile, (self.path,)


class TokenWriter:
    """Encodes documents into a token file; use it as a context manager.

    Exactly one end-of-text id follows each document. Blank documents are skipped and counted. The file appears
    under its name when the block ends without an exception, and not at all otherwise. Memory does not grow with
    the number of documents.

    Attributes:
        num_documents: documents written.
        num_bytes: UTF-8 bytes of those documents, end-of-text tokens not counted.
        num_tokens: ids written, end-of-text tokens counted.
        skipped: blank documents.
        eos_id: id of the end-of-text token.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Tokenizer, eos: str = EOS) -> None:
        """Start a file.

        Args:
            path: where the ids go; metadata goes beside it with the suffix ``.json``.
            tokenizer: any tokenizer with an end-of-text token; it is not changed. Special tokens that it would add
                by itself are not added, and those spelled out in a text are encoded as plain text.
            eos: spelling of the end-of-text token.

        Raises:
            UserError: the tokenizer has no such token.
        """
        from tokenizers import Tokenizer

        self.path = Path(path)
        self.num_documents = self.num_bytes = self.num_tokens = self.skipped = 0
        self.eos_id = eos_id(tokenizer, eos)
        self._vocab_size = max_id(tokenizer) + 1
        self._dtype = dtype_for(self._vocab_size - 1)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._can_cut = _is_plain_byte_level(self._tokenizer)
        self._pieces: list[str] = []
        self._last_of_document: list[bool] = []
        self._waiting = 0
        self._digest = hashlib.sha256()
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")

    def __enter__(self) -> TokenWriter:
        self._file = self._partial.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._publish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, text: str) -> bool:
        """Append one document.

        Returns:
            False if it was blank and skipped.
        """
        if not text.strip():
            self.skipped += 1
            return False
        pieces = list(cut_pieces(text)) if self._can_cut else [text]
        for number, piece in enumerate(pieces, start=1):
            self._pieces.append(piece)
            self._last_of_document.append(number == len(pieces))
            self._waiting += len(piece)
            if self._waiting >= _BATCH_CHARACTERS:
                self._flush()
        self.num_documents += 1
        self.num_bytes += len(text.encode("utf-8"))
        return True

    def _flush(self) -> None:
        encodings = self._tokenizer.encode_batch_fast(self._pieces, add_special_tokens=False)
        for encoding, last in zip(encodings, self._last_of_document, strict=True):
            ids = encoding.ids
            if last:
                ids.append(self.eos_id)
            data = np.asarray(ids, dtype=self._dtype).tobytes()
            self._digest.update(data)
            self._file.write(data)
            self.num_tokens += len(ids)
        self._pieces, self._last_of_document, self._waiting = [], [], 0

    def _publish(self) -> None:
        if not self.num_tokens:
            raise UserError(f"no document with text to write to {self.path}; give files that have text in them")
        metadata = {
            "format": _FORMAT,
            "dtype": self._dtype.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "skipped_documents": self.skipped,
            "vocab_size": self._vocab_size,
            "eos_id": self.eos_id,
            "sha256": self._digest.hexdigest(),
        }
        # Old metadata beside new ids, or the reverse, must never be readable as a pair.
        metadata_path(self.path).unlink(missing_ok=True)
        os.replace(self._partial, self.path)
        write_json(metadata_path(self.path), metadata)


def write_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, path: str | os.PathLike[str], eos: str = EOS
) -> TokenFile:
    """Encode documents into a token file and open it; see `TokenWriter` for the rules.

    Raises:
        UserError: a tokenizer without the end-of-text token, or no document with text.
    """
    with TokenWriter(path, tokenizer, eos) as writer:
        for text in documents:
            writer.add(text)
    return TokenFile(path)


def metadata_path(path: Path) -> Path:
    """Where the metadata of a token file lies."""
    return path.with_name(path.name + ".json")


def _read_metadata(path: Path) -> dict[str, Any]:
    beside = metadata_path(path)
    for needed in (path, beside):
        if not needed.is_file():
            raise UserError(f"no such token file: {needed}; prepare the data again")
    try:
        metadata = json.loads(beside.read_text(encoding="utf-8"))
        known = metadata["format"] == _FORMAT and metadata["dtype"] in ("<u2", "<u4")
        known = known and isinstance(metadata["num_tokens"], int) and metadata["num_tokens"] > 0
    except (ValueError, KeyError, TypeError):
        known, metadata = False, {}
    if not known:
        raise UserError(f"{beside} is not metadata of a token file; delete its folder and prepare the data again")
    return metadata


def _is_plain_byte_level(tokenizer: Tokenizer) -> bool:
    state = json.loads(tokenizer.to_str())
    pre = state["pre_tokenizer"] or {}
    plain = pre.get("type") == "ByteLevel" and pre.get("use_regex", True) and not pre.get("add_prefix_space")
    # Added tokens that are not special can span blanks, and a normalizer can look across a cut.
    return bool(plain and state["normalizer"] is None and all(token["special"] for token in state["added_tokens"]))
