"""What files hold before anybody asks what it means: text, JSON records, Parquet rows; nothing in them is changed."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from geonorm.errors import UserError, first_line
from geonorm.storage import read_json

COMPRESSIONS = frozenset((".xz", ".gz", ".zst"))
_MARK = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
# Files of facts that geonorm or a tokenizer wrote are far smaller.
_MOST_BYTES_OF_FACTS = 1 << 26
_ROWS_AT_A_TIME = 256


class UnreadableFile(UserError):
    """A file that cannot be read, or read to its end.

    Attributes:
        path: that file.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class RepeatingObject(dict[str, Any]):
    """A JSON object with a key given more than once; it holds the last value of each.

    Attributes:
        repeated: such keys.
    """

    repeated: frozenset[str] = frozenset()


def read_text(path: Path) -> str:
    r"""The whole text of a file: UTF-8, without a byte order mark, line ends as ``\n``.

    Raises:
        UnreadableFile: a file that cannot be decompressed or is not UTF-8.
    """
    with _faults_named(path), path.open("rb") as file:
        text = _decoded(_decompressed(file, path.suffix).read(), path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_lines(path: Path, file: BinaryIO, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the record of every line that is not blank, with its place.

    Args:
        path: name of the file, for messages.
        file: its bytes.
        suffix: one of `COMPRESSIONS` is taken off.

    Raises:
        UnreadableFile: a file that cannot be decompressed, is not UTF-8 or not JSON.
    """
    with _faults_named(path):
        yield from _records_of_lines(path, _decompressed(file, suffix))


def json_records(path: Path, file: BinaryIO, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the records of a list, of one object or of one object a line; otherwise as `json_lines`.

    A list, or an object that takes several lines, is in memory as a whole.
    """
    with _faults_named(path):
        opened = _decompressed(file, suffix)
        lines: list[bytes] = []
        for line in opened:
            lines.append(line)
            if line.removeprefix(_MARK).strip():
                break
        first = lines[-1].removeprefix(_MARK).strip() if lines else b""
        if not first.startswith(b"[") and _is_json(first):
            yield from _records_of_lines(path, itertools.chain(lines, opened))
            return
        text = _decoded(b"".join(lines) + opened.read(), path)
        if text.strip():
            found = _parsed(text, path, f"cannot read {path} as JSON", "repair or remove it")
            for number, record in enumerate(found if isinstance(found, list) else [found], start=1):
                yield f"{path}, record {number}", record


def parquet_facts(path: Path) -> tuple[list[str], int]:
    """Names of the columns and number of rows.

    Raises:
        UnreadableFile: not Parquet, or damaged.
    """
    import pyarrow.parquet

    # Opened here, because the library takes no name that is not UTF-8.
    with _faults_named(path, " as Parquet"), path.open("rb") as file:
        found = pyarrow.parquet.read_metadata(file)
        return found.schema.to_arrow_schema().names, found.num_rows


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield some columns of every row, with its place; no other column is read, so that their types do not matter.

    Raises:
        UnreadableFile: a damaged file, a string that is not UTF-8, two columns of that name.
    """
    import pyarrow.parquet

    number = 0
    with _faults_named(path), path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
        for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=list(columns)):
            for name in columns:
                if len(batch.schema.get_all_field_indices(name)) != 1:
                    raise UnreadableFile(path, f"{path} has more than one column `{name}`; rename one")
            for values in zip(*(batch.column(name) for name in columns), strict=True):
                number += 1
                where = f"{path}, row {number}"
                try:
                    row = {name: value.as_py() for name, value in zip(columns, values, strict=True)}
                except UnicodeDecodeError:
                    raise UnreadableFile(path, f"{where}: text is not UTF-8; repair or remove that row") from None
                yield where, row


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if there is none, or no regular file."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES_OF_FACTS:
            found = read_json(path)
            return found if isinstance(found, dict) else None
    return None


@contextlib.contextmanager
def _faults_named(path: Path, kind: str = "") -> Iterator[None]:
    """Whatever is raised by the libraries that read this very file is the user's to see."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk or the rights, not what is in the file
        raise UnreadableFile(
            path, f"cannot read {path}{kind}: {first_line(error, with_class=True)}; repair or remove it"
        ) from error


def _records_of_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        text = _decoded(line, path, number)
        if text.strip():
            where = f"{path}:{number}"
            yield where, _parsed(text, path, f"{where}: not valid JSON", "every line must be one JSON object")


def _decoded(data: bytes, path: Path, number: int = 1) -> str:
    """Bytes that begin with line ``number`` of a file as text."""
    if number == 1:
        data = data.removeprefix(_MARK)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number += data.count(b"\n", 0, error.start)
        offset = error.start - (data.rfind(b"\n", 0, error.start) + 1)
        raise UnreadableFile(
            path,
            f"{path}:{number}: byte 0x{data[error.start]:02x} at offset {offset} of the line is not UTF-8; convert"
            " the file to UTF-8",
        ) from None


def _parsed(text: str, path: Path, fault: str, remedy: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path, f"{fault} ({error}); {remedy}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = RepeatingObject(found)
    keys = [key for key, _ in pairs]
    repeating.repeated = frozenset(key for key in found if keys.count(key) > 1)
    return repeating


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _decompressed(file: BinaryIO, suffix: str) -> io.BufferedReader:
    if suffix == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)))
    if suffix == ".xz":
        return io.BufferedReader(cast(io.RawIOBase, lzma.LZMAFile(file)))
    if suffix == ".zst":
        import pyarrow

        # The package zstandard takes a file that was cut for a short one.
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return cast(io.BufferedReader, file)
