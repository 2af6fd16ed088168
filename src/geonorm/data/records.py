"""Records to documents: a text column, a prompt with its completion, or a conversation; every fault names its place.

The columns of the latter two have the names that TRL's trainers read: ``prompt`` and ``completion``, or ``messages``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from geonorm.data import raw
from geonorm.data.given_tokenizer import ChatTemplate, LeftOutError
from geonorm.data.raw import UnreadableFile
from geonorm.errors import UserError

# A column that is absent from this many leading records is taken to be missing, not sparse.
_RECORDS_BEFORE_COLUMN_IS_MISSING = 1000
_TEXT, _TURNS = "text", (("prompt", "completion"), ("messages",))


class Document(str):
    """A text that belongs to a group, or of which only parts are to be learned; everywhere else it is a string.

    Attributes:
        group: documents of one group, such as an author or a repository, stand on one side of a split.
        labelled: begin and end of the stretches of characters whose tokens have a label, in order; what lies outside is
            context, which is read and not predicted. None for all of the text.
        special: the spellings of special tokens stand for these tokens; in other texts they are plain text.
    """

    group: str | None
    labelled: tuple[tuple[int, int], ...] | None
    special: bool

    def __new__(
        cls,
        text: str,
        group: str | None = None,
        labelled: Iterable[Iterable[int]] | None = None,
        special: bool = False,
    ) -> Document:
        """Make a document."""
        document = super().__new__(cls, text)
        document.group, document.special = group, special
        document.labelled = None if labelled is None else tuple((first, last) for first, last in labelled)
        return document

    def piece(self, start: int, stop: int) -> Document:
        """Characters ``start`` to ``stop - 1`` with what belongs to them."""
        spans = self.labelled
        if spans is not None:
            cut = [(max(first, start) - start, min(last, stop) - start) for first, last in spans]
            spans = [(first, last) for first, last in cut if first < last]
        return Document(self[start:stop], self.group, spans, self.special)


def read_records(path: Path, kind: str, columns: Columns) -> Iterator[str]:
    """Yield the documents of one file.

    Args:
        path: plain or compressed file; a JSON list is read into memory as a whole.
        kind: ``"jsonl"``, ``"json"`` (a list of objects, one object, or one a line) or ``"parquet"``.
        columns: what takes them, and counts what it leaves out.

    Raises:
        UserError: a file or record that cannot be read, a text that is not a string, a column that does not exist.
    """
    if kind == "parquet":
        names, num_rows = raw.parquet_facts(path)
        columns.names.update(names)
        if num_rows:
            columns.require()
            for where, row in raw.parquet_rows(path, columns.wanted(names)):
                yield from columns.take(row, where)
    else:
        read = raw.json_lines if kind == "jsonl" else raw.json_records
        with path.open("rb") as file:
            columns.position = lambda: 0 if file.closed else file.tell()
            for where, record in read(path, file, path.suffix):
                yield from columns.take(record, where)
    columns.finish()


class Columns:
    """Takes the text out of records and remembers which columns there were, for the error message.

    Attributes:
        position: gives the number of bytes of the file that were read; 0 where nobody knows.
    """

    def __init__(
        self,
        source: Path | str,
        column: str,
        skipped: Counter[str],
        group_by: str | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Start.

        Args:
            source: the file, or the name of what is no file.
            column: name of the text column; records where it is null or absent are left out.
            skipped: counts what is left out, by reason.
            group_by: column that names the group of a record.
            chat: writes conversations.
        """
        self.source, self.column, self.skipped, self.group_by = source, column, skipped, group_by
        self.chat = chat or ChatTemplate()
        self.names: set[str] = set()
        self.num_records = 0
        self.position: Callable[[], int] = int

    def wanted(self, names: Collection[str]) -> list[str]:
        """The columns to read of a table or record that has ``names``."""
        return [*self._text_columns(names), *([] if self.group_by is None else [self.group_by])]

    def take(self, record: Any, where: str) -> Iterator[str]:
        """Yield the text of a record, or count why there is none.

        Raises:
            UserError: the record or its text is of another type, or the column does not exist.
        """
        if not isinstance(record, dict):
            raise self._error(f"{where}: a JSON {type(record).__name__}, not an object with a `{self.column}` field")
        self.num_records += 1
        self.names.update(record)
        for column in self.wanted(record):
            key = column if column in _repeated(record) else _repeated_inside(record.get(column))
            if key is not None:
                raise self._error(f"{where}: the key `{key}` is given more than once; keep one of them")
        try:
            text = self._text(record)
        except LeftOutError as error:
            self.skipped[str(error)] += 1
            return
        except UserError:  # of the template, not of this record
            raise
        except ValueError as error:
            raise self._error(f"{where}: {error}") from None
        if text is None:
            if self.num_records == _RECORDS_BEFORE_COLUMN_IS_MISSING:
                self.require()
            self.skipped["null text"] += 1
            return
        if (fault := _lone_surrogate(text)) is not None:
            raise self._error(f"{where}: {fault}; repair or remove that record")
        if self.group_by is not None:
            text = text if isinstance(text, Document) else Document(text)
            text.group = self._group(record, where)
        yield text

    def require(self) -> None:
        """Raise a `UserError` if no record had the column."""
        for column in self.wanted(self.names):
            if column not in self.names:
                raise UserError(f"{self.source} has no column `{column}`; its columns are: {self._known()}")

    def finish(self) -> None:
        """Check the column once all records were taken."""
        if self.num_records:
            self.require()
        elif isinstance(self.source, Path):
            self.skipped["empty file"] += 1

    def _text_columns(self, names: Collection[str]) -> tuple[str, ...]:
        """``column``; where it is the default and absent, those of turns."""
        if self.column == _TEXT and _TEXT not in names:
            for known in _TURNS:
                if set(known) <= set(names):
                    return known
        return (self.column,)

    def _text(self, record: dict[str, Any]) -> str | None:
        """The text of a record, None where it is null; a `ValueError` does not say where the record stands."""
        columns = self._text_columns(record)
        parts = [record.get(name) for name in columns]
        if None in parts:
            return None
        if len(parts) == 1 and isinstance(parts[0], list) and any(isinstance(part, dict) for part in parts[0]):
            text, spans = self.chat.write(parts[0], columns[0])
            return Document(text, labelled=spans, special=True)
        for name, part in zip(columns, parts, strict=True):
            if not isinstance(part, str):
                what = f"`{name}` is of type {type(part).__name__}, not a string"
                raise ValueError(f"{what}; name the column that holds the text" if len(parts) == 1 else what)
        text = "".join(map(str, parts))
        # A prompt is the context of its completion.
        return text if len(parts) == 1 else Document(text, labelled=[(len(str(parts[0])), len(text))])

    def _group(self, record: dict[str, Any], where: str) -> str:
        if self.group_by not in record:
            raise self._error(f"{where}: no column `{self.group_by}` to group by; its columns are: {self._known()}")
        group = record[str(self.group_by)]
        if isinstance(group, (str, int)) and str(group).strip() and _lone_surrogate(str(group)) is None:
            return str(group)
        raise self._error(
            f"{where}: `{self.group_by}` must name the group of the record, a word or a whole number, got {group!r}"
        )

    def _known(self) -> str:
        return ", ".join(sorted(self.names))

    def _error(self, message: str) -> UserError:
        return UnreadableFile(self.source, message) if isinstance(self.source, Path) else UserError(message)


def _repeated(value: Any) -> frozenset[str]:
    return value.repeated if isinstance(value, raw.RepeatingObject) else frozenset()


def _repeated_inside(value: Any) -> str | None:
    """A key that an object at any depth, such as a turn of a conversation, gives more than once."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = next(iter(_repeated(value)), None)
    return found or next((key for part in inner if (key := _repeated_inside(part)) is not None), None)


def _lone_surrogate(text: str) -> str | None:
    """What keeps ``text`` from being written as UTF-8: JSON can spell a lone surrogate, such as ``\\ud800``."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None
