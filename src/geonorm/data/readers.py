"""Documents out of one kind of file: the text of each record; every failure names its file and its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from geonorm.data import raw
from geonorm.data.document import grouped
from geonorm.data.raw import UnreadableFile
from geonorm.data.turns import ChatTemplate, LeftOutError, columns_of, text_of
from geonorm.errors import UserError

# A column that is absent from this many leading records is taken to be missing, not sparse.
_RECORDS_BEFORE_COLUMN_IS_MISSING = 1000


def read_jsonl(
    path: Path,
    column: str,
    skipped: Counter[str],
    group_by: str | None = None,
    chat: ChatTemplate | None = None,
) -> Iterator[str]:
    """Yield the text column of a file with one JSON object per line.

    Args:
        path: plain or compressed file.
        column: name of the text column; records where it is null or absent are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.
        chat: writes conversations.

    Raises:
        UserError: a line that is not a JSON object, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by, chat)
    with path.open("rb") as file:
        for where, record in raw.json_lines(path, file, path.suffix):
            yield from columns.take(record, where)
    columns.finish()


def read_json(
    path: Path,
    column: str,
    skipped: Counter[str],
    group_by: str | None = None,
    chat: ChatTemplate | None = None,
) -> Iterator[str]:
    """Yield the text column of a JSON file: a list of objects, one object, or one object per line.

    Args:
        path: plain or compressed file; a list is read into memory as a whole.
        column: name of the text column; records where it is null or absent are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.
        chat: writes conversations.

    Raises:
        UserError: invalid JSON, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by, chat)
    with path.open("rb") as file:
        for where, record in raw.json_records(path, file, path.suffix):
            yield from columns.take(record, where)
    columns.finish()


def read_parquet(
    path: Path,
    column: str,
    skipped: Counter[str],
    group_by: str | None = None,
    chat: ChatTemplate | None = None,
) -> Iterator[str]:
    """Yield the text column of a Parquet file; no other column is read.

    Args:
        path: the file.
        column: name of the text column; null rows are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.
        chat: writes conversations.

    Raises:
        UserError: a damaged file, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by, chat)
    names, num_rows = raw.parquet_facts(path)
    columns.names.update(names)
    if num_rows:
        columns.require()
        for where, row in raw.parquet_rows(path, wanted_columns(names, column, group_by)):
            yield from columns.take(row, where)
    columns.finish()


def wanted_columns(names: Collection[str], column: str, group_by: str | None) -> list[str]:
    """The columns to read of a table that has ``names``."""
    return [*columns_of(names, column), *([] if group_by is None else [group_by])]


class Columns:
    """Takes the text out of records and remembers which columns there were, for the error message."""

    def __init__(
        self,
        source: Path | str,
        column: str,
        skipped: Counter[str],
        group_by: str | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Start; ``source`` is the file, or the name of what is no file."""
        self.source, self.column, self.skipped, self.group_by = source, column, skipped, group_by
        self.chat = chat or ChatTemplate()
        self.names: set[str] = set()
        self.records = 0

    def take(self, record: Any, where: str) -> Iterator[str]:
        """Yield the text of a record, or count why there is none.

        Raises:
            UserError: the record or its text is of another type, or the column does not exist.
        """
        if not isinstance(record, dict):
            raise self._error(f"{where}: a JSON {type(record).__name__}, not an object with a `{self.column}` field")
        self.records += 1
        self.names.update(record)
        for column in wanted_columns(record, self.column, self.group_by):
            key = column if column in _repeated(record) else _repeated_inside(record.get(column))
            if key is not None:
                raise self._error(f"{where}: the key `{key}` is given more than once; keep one of them")
        try:
            text = text_of(record, self.column, self.chat)
        except LeftOutError as error:
            self.skipped[str(error)] += 1
            return
        except UserError:  # of the template, not of this record
            raise
        except ValueError as error:
            raise self._error(f"{where}: {error}") from None
        if text is None:
            if self.records == _RECORDS_BEFORE_COLUMN_IS_MISSING:
                self.require()
            self.skipped["null text"] += 1
            return
        fault = lone_surrogate(text)
        if fault is not None:
            raise self._error(f"{where}: {fault}; repair or remove that record")
        yield text if self.group_by is None else grouped(text, self._group(record, where))

    def require(self) -> None:
        """Raise a `UserError` if no record had the column."""
        for column in wanted_columns(self.names, self.column, self.group_by):
            if column not in self.names:
                known = ", ".join(sorted(self.names))
                raise UserError(f"{self.source} has no column `{column}`; its columns are: {known}")

    def finish(self) -> None:
        """Check the column once all records were taken."""
        if self.records:
            self.require()
        elif isinstance(self.source, Path):
            self.skipped["empty file"] += 1

    def _group(self, record: dict[str, Any], where: str) -> str:
        if self.group_by not in record:
            known = ", ".join(sorted(self.names))
            raise self._error(f"{where}: no column `{self.group_by}` to group by; its columns are: {known}")
        group = record[str(self.group_by)]
        if isinstance(group, (str, int)) and str(group).strip() and lone_surrogate(str(group)) is None:
            return str(group)
        raise self._error(
            f"{where}: `{self.group_by}` must name the group of the record, a word or a whole number, got {group!r}"
        )

    def _error(self, message: str) -> UserError:
        return UnreadableFile(self.source, message) if isinstance(self.source, Path) else UserError(message)


def _repeated(value: Any) -> frozenset[str]:
    return value.repeated if isinstance(value, raw.RepeatingObject) else frozenset()


def _repeated_inside(value: Any) -> str | None:
    """A key that an object at any depth, such as a turn of a conversation, gives more than once."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = next(iter(_repeated(value)), None)
    return found or next((key for part in inner if (key := _repeated_inside(part)) is not None), None)


def lone_surrogate(text: str) -> str | None:
    """What keeps ``text`` from being written as UTF-8: JSON can spell a lone surrogate, such as ``\\ud800``."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None
