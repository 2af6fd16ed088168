"""The text that a model is inspected with, cut into windows of tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from geonorm.errors import UserError, check_count
from geonorm.models.tokens import encode_plain

# Enough to spread windows over; a longer file is read up to here.
MAX_CHARACTERS = 2_000_000
# Of the default text, whose modules have to be parsed: more than any number of windows needs, in under a second.
DEFAULT_CHARACTERS = 400_000
_FIRST_GUESS = 12


@dataclasses.dataclass(frozen=True)
class Text:
    """Text in one string.

    Attributes:
        text: documents, an empty line between them.
        name: where it is from, for the report.
        cut: whether files held more than :data:`MAX_CHARACTERS`.
        notes: what was left out, a line each.
    """

    text: str
    name: str
    cut: bool
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The start of its SHA-256, to tell texts apart."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class TokenWindows:
    """Windows of one tokenizer.

    Attributes:
        ids: one list a window; lengths differ only where the text ran out.
        added: what the tokenizer puts before a text by itself, such as ``("<s>",)``.
    """

    ids: tuple[tuple[int, ...], ...]
    added: tuple[str, ...]


def read_text(paths: Sequence[Path], text_column: str = "text") -> Text:
    """Read files or folders, or without any the documentation of Python's standard library.

    Args:
        paths: text, JSON lines or Parquet, files or folders of them.
        text_column: the column of JSON and Parquet files that holds the text.

    Raises:
        UserError: a path that cannot be read, or no text in it.
    """
    # The readers bring the data libraries along, which take seconds to import.
    if paths:
        from geonorm.data.sources import FileSource

        source = FileSource(paths, text_column)
        names = source.names
        name = ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more files"
        text, cut = _joined(source.documents(Counter()), MAX_CHARACTERS)
        notes = source.notes()
    else:
        from geonorm.data.standard_library import library_documentation

        name = "documentation strings of Python's standard library"
        text, cut = _joined(library_documentation(), DEFAULT_CHARACTERS)[0], False
        notes = []
    if not text.strip():
        raise UserError(f"no text in {name}; give a file with text")
    return Text(text, name, cut, tuple(notes))


def _joined(documents: Iterable[str], limit: int) -> tuple[str, bool]:
    parts, total = [], 0
    for document in documents:
        parts.append(document.strip())
        total += len(parts[-1]) + 2
        if total > limit:
            return "\n\n".join(parts)[:limit], True
    return "\n\n".join(parts), False


def make_windows(
    text: str, tokenizer: Any, *, num_windows: int, length: int, special_tokens: bool = True
) -> TokenWindows:
    """Cut windows from evenly spaced places of a text, each starting at a word.

    Args:
        text: the text; the spelling of a special token in it is text.
        tokenizer: of transformers.
        num_windows: how many, at least 1; fewer come back where the text is too short for so many.
        length: tokens in each, at least 2; shorter where the text runs out.
        special_tokens: whether each window starts with what the tokenizer puts before a text by itself.

    Raises:
        UserError: a count out of range, or not even two tokens of text.
    """
    num_windows, length = check_count("windows", num_windows), check_count("length", length, 2)
    words = encode_plain(tokenizer, text[: _FIRST_GUESS * length])
    if len(words) < 2:
        raise UserError("the text gives fewer than two tokens; give more text")
    # Characters a token of this text, so that a short text is not cut into windows that it cannot fill.
    per_token = min(len(text), _FIRST_GUESS * length) / len(words)
    fitting = max(1, int(len(text) / (per_token * length)))
    num_windows = min(num_windows, fitting)
    share = len(text) // num_windows
    windows = []
    for index in range(num_windows):
        part = _from_word(text[index * share : (index + 1) * share], index > 0)
        taken = part[: 2 * _FIRST_GUESS * length]
        ids = encode_plain(tokenizer, taken, add_special_tokens=special_tokens)[:length]
        if len(ids) < length and len(taken) < len(part):
            ids = encode_plain(tokenizer, part, add_special_tokens=special_tokens)[:length]
        if len(ids) > 1:
            windows.append(tuple(ids))
    return TokenWindows(tuple(windows), _prefix(tokenizer) if special_tokens else ())


def _prefix(tokenizer: Any) -> tuple[str, ...]:
    plain = encode_plain(tokenizer, "a")
    full = encode_plain(tokenizer, "a", add_special_tokens=True)
    for start in range(len(full)):
        if full[start : start + len(plain)] == plain:
            return tuple(tokenizer.convert_ids_to_tokens(full[:start]))
    return ()


def _from_word(text: str, inside: bool) -> str:
    if not inside:
        return text
    start = next((index for index, character in enumerate(text) if character.isspace()), 0)
    return text[start:].lstrip() or text
