"""A prepared corpus: a folder with three token files, the tokenizer and a description."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.token_file import TokenFile
from geonorm.data.tokenizer import load_tokenizer
from geonorm.data.windows import HeldOutWindows, spread_windows
from geonorm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DESCRIPTION, TOKENIZER, TOKEN_BYTES = "description.json", "tokenizer.json", "token_bytes.npy"
TOKEN_FILES = {"train": "train.tokens", "val": "val.tokens", "test": "test.tokens"}
GROUP_FILES = {"val": "val.groups.npy", "test": "test.groups.npy"}


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
        description: JSON-able facts: ``sources``, ``num_documents``, ``num_groups``, ``num_bytes`` and ``num_tokens``
            (each with ``train``, ``val`` and ``test``; copies of one document are one group where none are named),
            ``largest_share`` (``val`` and ``test``: the largest group's share of the tokens), ``overlap`` (``ngram``,
            and for ``val`` and ``test`` the share of tokens that lie in an n-gram of the training side),
            ``skipped`` (number by reason), ``bytes_per_token``, ``vocab_size``,
            ``num_labels`` (by side; only where some tokens have none),
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
        if "overlap" not in description:
            raise UserError(
                f"{folder} was prepared by an earlier version, without a test side; delete it and prepare again"
            )
        for needed in (corpus.tokenizer_path, folder / TOKEN_BYTES, *(folder / name for name in GROUP_FILES.values())):
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
        """Tokens held out to choose on: learning rates, options, when to stop. No document is on two sides."""
        return TokenFile(self.path / TOKEN_FILES["val"])

    @functools.cached_property
    def test(self) -> TokenFile:
        """Tokens held out to report on, which no choice has seen."""
        return TokenFile(self.path / TOKEN_FILES["test"])

    def held_out(self, side: str, length: int, count: int) -> HeldOutWindows:
        """At most ``count`` windows of a held-out side, spread over its groups; see `spread_windows`.

        Args:
            side: ``"val"`` or ``"test"``.
            length: tokens per window, the target shift not counted.
            count: number of windows, at least 1.

        Raises:
            UserError: the side holds less than one window.
        """
        groups = np.load(self.path / GROUP_FILES[side], allow_pickle=False)
        return spread_windows(getattr(self, side), groups, length, count)

    @property
    def num_labels(self) -> dict[str, int]:
        """Tokens that have a label, by side; all of them where there is no mask."""
        return {side: getattr(self, side).num_labels for side in TOKEN_FILES}

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
