"""A prepared corpus: a folder with three token files, the tokenizer and a description, which is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.raw import read_object
from geonorm.data.token_file import TokenFile
from geonorm.data.tokenizer import load_tokenizer
from geonorm.data.windows import HeldOutWindows, spread_windows
from geonorm.errors import UserError
from geonorm.storage import read_json, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DESCRIPTION, TOKENIZER, TOKEN_BYTES = "description.json", "tokenizer.json", "token_bytes.npy"
TOKEN_FILES = {"train": "train.tokens", "val": "val.tokens", "test": "test.tokens"}
GROUP_FILES = {"val": "val.groups.npy", "test": "test.groups.npy"}
_WORK, _WORK_KEY, _LOCK = ".building", "key.json", ".lock"


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


def prepared(paths: Sequence[str | os.PathLike[str]] | None) -> Path | None:
    """The first of the paths that is a prepared corpus."""
    folders = (Path(path).expanduser() for path in paths or ())
    return next((folder for folder in folders if _read_description(folder) is not None), None)


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the cache, made if need be: ``cache_dir``, ``$GEONORM_CACHE`` or ``~/.cache/geonorm``.

    Raises:
        UserError: it cannot be made.
    """
    folder = Path(cache_dir or os.environ.get("GEONORM_CACHE") or Path.home() / ".cache" / "geonorm").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder} ({error.strerror}); set `cache_dir` or GEONORM_CACHE"
        ) from error
    return folder


def _read_description(folder: Path) -> dict[str, Any] | None:
    found = read_object(folder / DESCRIPTION)
    return found if found is not None and {"fingerprint", "num_tokens", "eos_id"} <= found.keys() else None


def is_whole(final: Path, key: str) -> bool:
    """Whether ``final`` holds this very corpus.

    Raises:
        UserError: it holds something else.
    """
    if not final.exists():
        return False
    if not final.is_dir():
        raise UserError(f"{final} is a file; name a folder")
    if (final / DESCRIPTION).exists():
        if (_read_description(final) or {}).get("key") == key:
            return True
        raise UserError(
            f"{final} holds a corpus of other text or settings; name another folder, or delete it to prepare anew"
        )
    # Runs and comparisons have a lock of the same name, so a lock alone does not make a folder one of a corpus.
    if any(path.name not in (_WORK, _LOCK) for path in final.iterdir()) and not (final / _WORK).exists():
        raise UserError(f"{final} is not empty and holds no corpus; name another folder")
    return False


@contextlib.contextmanager
def building(final: Path, key: str) -> Iterator[Path | None]:
    """A folder for what a build can go on from, removed when the block ends well; None if it was built meanwhile."""
    from filelock import FileLock

    final.mkdir(parents=True, exist_ok=True)
    with FileLock(final / _LOCK):
        if is_whole(final, key):
            yield None
            return
        work = final / _WORK
        if read_json(work / _WORK_KEY) not in (key, None):
            raise UserError(
                f"{final} holds an unfinished corpus of other text or settings; finish it with the command that began"
                " it, name another folder, or delete it"
            )
        work.mkdir(exist_ok=True)
        write_json(work / _WORK_KEY, key)
        # Nobody else builds here while the lock is held, so these were left by a process that was killed.
        for left in final.glob("*.partial"):
            left.unlink()
        yield work
        shutil.rmtree(work, ignore_errors=True)
    # Whoever waits for the lock finds the corpus whole, so nobody builds any more.
    (final / _LOCK).unlink(missing_ok=True)
