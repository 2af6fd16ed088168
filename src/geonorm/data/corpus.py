"""A prepared corpus: a folder with two token files, the tokenizer and a description."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.packed import TokenFile
from geonorm.data.tokenizer import load_tokenizer
from geonorm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DESCRIPTION, TOKENIZER, TOKEN_BYTES = "description.json", "tokenizer.json", "token_bytes.npy"
TOKEN_FILES = {"train": "train.tokens", "val": "val.tokens"}


@dataclasses.dataclass(frozen=True)
class BuildFacts:
    """How a corpus was just made.

    Attributes:
        seconds: wall-clock time of everything, reading and tokenizer included.
        tokens_per_second: ids of the corpus over those seconds.
        workers: processes that encoded.
        num_shards: shards that were encoded, those kept included.
        num_kept_shards: shards taken over from an interrupted run.
    """

    seconds: float
    tokens_per_second: float
    workers: int
    num_shards: int
    num_kept_shards: int


class Corpus:
    """A prepared corpus, opened; it can be sent to another process, which opens the same folder.

    Attributes:
        path: the folder that holds it.
        description: JSON-able facts: ``sources``, ``num_documents``, ``num_bytes`` and ``num_tokens`` (each with
            ``train`` and ``val``), ``skipped`` (number by reason), ``bytes_per_token``, ``vocab_size``,
            ``fingerprint`` (SHA-256 of the documents), ``tokenizer`` (where it is from), ``eos`` (its end-of-text
            token), ``settings``, ``notes`` and ``key`` (digest of content and settings).
        build: set where `prepare` has just made it, None where it was opened.
    """

    def __init__(self, path: Path, description: dict[str, Any], build: BuildFacts | None = None) -> None:
        self.path = path
        self.description = description
        self.build = build

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Corpus:
        """Open a prepared corpus.

        Args:
            path: a folder that `prepare` made.

        Raises:
            UserError: not such a folder, or its files are damaged.
        """
        folder = Path(path).resolve()
        try:
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{folder} is not a prepared corpus (no {DESCRIPTION}); prepare the data first") from None
        except ValueError:
            raise UserError(f"{folder / DESCRIPTION} is damaged; delete {folder} and prepare the data again") from None
        corpus = cls(folder, description)
        for needed in (corpus.tokenizer_path, folder / TOKEN_BYTES):
            if not needed.is_file():
                raise UserError(f"{needed} is missing; delete {folder} and prepare the data again")
        # Opening checks sizes, so that damage shows here and not in the middle of a run.
        for side in TOKEN_FILES:
            getattr(corpus, side)
        return corpus

    @functools.cached_property
    def train(self) -> TokenFile:
        """Tokens to train on."""
        return TokenFile(self.path / TOKEN_FILES["train"])

    @functools.cached_property
    def val(self) -> TokenFile:
        """Tokens held out; no document is on both sides."""
        return TokenFile(self.path / TOKEN_FILES["val"])

    @property
    def tokenizer_path(self) -> Path:
        """The file of the tokenizer; `tokenizer` opens it as it has to be opened."""
        return self.path / TOKENIZER

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; the spelling of a special token inside a text is plain text to it."""
        return load_tokenizer(self.tokenizer_path)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-text token included."""
        return int(self.description["vocab_size"])

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        return int(self.description["eos_id"])

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """int64 array ``[vocab_size]``: UTF-8 bytes that each id stands for; the end-of-text token counts 0.

        Exact for byte-level tokenizers; for others `description` has a note that says by how much it is off.
        """
        return np.load(self.path / TOKEN_BYTES, allow_pickle=False)

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r})"

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Corpus.load, (self.path,)
