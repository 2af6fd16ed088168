"""Documents out of one kind of file, read by the library `datasets`; every failure names its file and line."""

from __future__ import annotations

import codecs
import contextlib
import glob
import io
import json
import locale
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from geonorm.data.document import Document
from geonorm.errors import UserError

COMPRESSIONS = {".xz": "xz", ".gz": "gzip", ".zst": "zstd"}

# A column that is absent from this many leading records is taken to be missing, not sparse.
_RECORDS_BEFORE_COLUMN_IS_MISSING = 1000


class UnreadableFile(UserError):
    """A file that cannot be read, or read to its end.

    Attributes:
        path: that file.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


def read_text(paths: Sequence[Path]) -> Iterator[str]:
    r"""Yield one document per file: the whole text, UTF-8, without a byte order mark, line ends as ``\n``.

    Args:
        paths: plain or compressed text files, none of them empty.

    Raises:
        UnreadableFile: a file that cannot be decompressed or is not UTF-8.
    """
    rows = _rows("text", paths, sample_by="document", encoding="utf-8-sig")
    for row in rows:
        yield row["text"].removeprefix("\ufeff")


def read_jsonl(path: Path, column: str, skipped: Counter[str], group_by: str | None = None) -> Iterator[str]:
    """Yield the text column of a file with one JSON object per line.

    Lines are read as text and parsed one by one, because a reader that infers a schema turns strings that look
    like dates into timestamps and fails when an unrelated column changes its type further down.

    Args:
        path: plain or compressed file.
        column: name of the text column; records where it is null or absent are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.

    Raises:
        UserError: a line that is not a JSON object, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by)
    rows = _rows("text", [path], sample_by="line", encoding="utf-8-sig")
    for number, row in enumerate(rows, start=1):
        line = row["text"].removeprefix("\ufeff") if number == 1 else row["text"]
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            message = f"{where}: not valid JSON ({error}); every line must be one JSON object"
            raise UnreadableFile(path, message) from None
        yield from columns.take(record, where)
    columns.finish()


def read_json(path: Path, column: str, skipped: Counter[str], group_by: str | None = None) -> Iterator[str]:
    """Yield the text column of a JSON file: a list of objects, one object, or one object per line.

    Args:
        path: plain or compressed file; a list is read into memory as a whole.
        column: name of the text column; records where it is null or absent are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.

    Raises:
        UserError: invalid JSON, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by)
    rows = _rows("json", [path], parse_agent_traces=False)
    for number, row in enumerate(rows, start=1):
        yield from columns.take(row, f"{path}, record {number}")
    columns.finish()


def read_parquet(path: Path, column: str, skipped: Counter[str], group_by: str | None = None) -> Iterator[str]:
    """Yield the text column of a Parquet file; no other column is read.

    Args:
        path: the file.
        column: name of the text column; null rows are skipped and counted.
        skipped: counter of skipped items by reason.
        group_by: column that names the group of a record.

    Raises:
        UserError: a damaged file, a text that is not a string, a column that does not exist.
    """
    columns = Columns(path, column, skipped, group_by)
    try:
        import pyarrow.parquet

        columns.names.update(pyarrow.parquet.read_schema(path).names)
    except Exception as error:
        message = f"cannot read {path} as Parquet: {one_line(error)}; repair or remove it"
        raise UnreadableFile(path, message) from error
    columns.require()
    for number, row in enumerate(
        _rows("parquet", [path], columns=[column] if group_by is None else [column, group_by]), start=1
    ):
        yield from columns.take(row, f"{path}, row {number}")


class Columns:
    """Takes the text out of records and remembers which columns there were, for the error message."""

    def __init__(self, source: Path | str, column: str, skipped: Counter[str], group_by: str | None = None) -> None:
        """Start; ``source`` is the file, or the name of what is no file."""
        self.source, self.column, self.skipped, self.group_by = source, column, skipped, group_by
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
        text = record.get(self.column)
        if text is None:
            if self.records == _RECORDS_BEFORE_COLUMN_IS_MISSING:
                self.require()
            self.skipped["null text"] += 1
        elif isinstance(text, str):
            fault = lone_surrogate(text)
            if fault is not None:
                raise self._error(f"{where}: {fault}; repair or remove that record")
            yield text if self.group_by is None else Document(text, self._group(record, where))
        else:
            raise self._error(
                f"{where}: `{self.column}` is of type {type(text).__name__}, not a string;"
                " name the column that holds the text"
            )

    def require(self) -> None:
        """Raise a `UserError` if no record had the column."""
        for column in (self.column, self.group_by):
            if column is not None and column not in self.names:
                known = ", ".join(sorted(self.names))
                raise UserError(f"{self.source} has no column `{column}`; its columns are: {known}")

    def finish(self) -> None:
        """Check the column once all records were taken."""
        if self.records:
            self.require()

    def _group(self, record: dict[str, Any], where: str) -> str:
        if self.group_by not in record:
            known = ", ".join(sorted(self.names))
            raise self._error(f"{where}: no column `{self.group_by}` to group by; its columns are: {known}")
        group = record[str(self.group_by)]
        if isinstance(group, (str, int)) and str(group).strip():
            return str(group)
        raise self._error(
            f"{where}: `{self.group_by}` must name the group of the record, a word or a whole number, got {group!r}"
        )

    def _error(self, message: str) -> UserError:
        return UnreadableFile(self.source, message) if isinstance(self.source, Path) else UserError(message)


def lone_surrogate(text: str) -> str | None:
    """What keeps ``text`` from being written as UTF-8: JSON can spell a lone surrogate, such as ``\\ud800``."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None


def _rows(builder: str, paths: Sequence[Path], **options: Any) -> Iterator[dict[str, Any]]:
    """Stream rows of local files through `datasets`, offline, silently and leaving nothing in the home folder."""
    if not paths:
        return
    if builder == "text":
        _check_locale(paths)
    seen = 0
    with quiet(), tempfile.TemporaryDirectory(prefix="geonorm-") as cache:
        # Whatever is raised in here comes from the library reading these very files, so it is the user's to see.
        try:
            import datasets

            try:
                rows = datasets.load_dataset(
                    builder,
                    # The library takes names for glob patterns.
                    data_files=[glob.escape(str(path.absolute())) for path in paths],
                    split="train",
                    streaming=True,
                    cache_dir=cache,
                    **options,
                )
            except StopIteration:  # the JSON reader's answer to a compressed file with nothing in it
                return
            for row in rows:
                yield row
                seen += 1
        except MemoryError:
            raise
        except Exception as error:
            # Whole-document text gives one row per file, all other readers are called with one file.
            path = paths[min(seen, len(paths) - 1)]
            if isinstance(error, UnicodeDecodeError):
                raise _not_utf8(path, builder, seen) from None
            raise UnreadableFile(path, f"cannot read {path}: {one_line(error)}; repair or remove it") from error


def _check_locale(paths: Sequence[Path]) -> None:
    """Refuse compressed text under a locale other than UTF-8: there `datasets` ignores the encoding it is given."""
    packed = next((path for path in paths if path.suffix in COMPRESSIONS), None)
    encoding = locale.getpreferredencoding(False)
    if packed is not None and codecs.lookup(encoding).name != "utf-8":
        raise UserError(
            f"cannot read {packed} under the locale encoding {encoding}; set PYTHONUTF8=1 or decompress it first"
        )


def _not_utf8(path: Path, builder: str, seen: int) -> UnreadableFile:
    if builder == "parquet":
        return UnreadableFile(path, f"{path}, row {seen + 1}: text is not valid UTF-8; repair or remove that row")
    import fsspec

    number = 0
    with fsspec.open(str(path), "rb", compression=COMPRESSIONS.get(path.suffix)) as file:
        for number, line in enumerate(io.BufferedReader(cast(io.RawIOBase, file)), start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return UnreadableFile(
                    path,
                    f"{path}:{number}: byte 0x{line[error.start]:02x} at offset {error.start} of the line is not"
                    " UTF-8; convert the file to UTF-8",
                )
    return UnreadableFile(path, f"{path}:{number}: not UTF-8; convert the file to UTF-8")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep `datasets` from drawing bars and from logging what it raises anyway."""
    import datasets
    from datasets.utils import logging

    bars = not datasets.are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    if bars:
        datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def one_line(error: Exception) -> str:
    """Type and first line of an exception."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
