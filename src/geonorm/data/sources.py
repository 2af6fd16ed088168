"""Where documents come from: files here, or several sources in one, with a fingerprint of the content."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from geonorm.data.found import Found
from geonorm.data.given_tokenizer import ChatTemplate
from geonorm.data.raw import UnreadableFile, read_text
from geonorm.data.records import Columns, read_records
from geonorm.errors import UserError, check_unicode, printable
from geonorm.storage import sha256

_MOST_NAMED = 20


class Source:
    """Sources one after another, and the base of each: read more than once, it gives the same documents each time.

    Attributes:
        folder: where the source may keep what it read, set before `documents` is called.
    """

    folder: Path | None = None

    def __init__(self, parts: Sequence[Source] = ()) -> None:
        self.parts = parts

    @property
    def names(self) -> list[str]:
        """Names of the parts, for people."""
        return [name for part in self.parts for name in part.names]

    def fingerprint(self) -> str:
        """Hex digest of the raw content and of how it is read; cheaper than reading the documents."""
        return hashlib.sha256("\n".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents in a fixed order and count in ``skipped`` what was left out, by reason."""
        for number, part in enumerate(self.parts):
            part.folder = None if self.folder is None else self.folder / str(number)
            yield from part.documents(skipped)

    def check_unchanged(self) -> None:
        """Raise a `UserError` if the content changed after `fingerprint`."""
        for part in self.parts:
            part.check_unchanged()

    def notes(self) -> list[str]:
        """A line for each part that was not read, or not to its end, so far."""
        return [note for part in self.parts for note in part.notes()]

    def share_read(self) -> float | None:
        """How much of it `documents` has read, from 0 to 1; None where nobody knows."""
        return None


class FileSource(Source):
    """Documents of local files.

    A text file is one document. A ``.jsonl``, ``.json`` or ``.parquet`` file has one document per record. Text and
    JSON files may carry a further suffix ``.xz``, ``.gz`` or ``.zst``. Folders are walked to the bottom, links to
    folders not followed; hidden files and folders are left out, files with other suffixes are skipped and counted.
    Only regular files are read, so that a pipe never makes a program wait, and nothing that geonorm wrote itself.
    A file that is reached twice is read once.

    Attributes:
        files: path and kind of each file, sorted by path.
        left_out: what a path is that would have been read if it were a file of text, such as ``"pipe"``.
        unreadable: why a file was given up, by path; filled while reading if ``skip_unreadable`` is set.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        text_column: str = "text",
        skip_unreadable: bool = False,
        group_by: str | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Find the files.

        Args:
            paths: files, folders and patterns (``*``, ``?``, ``[...]``, ``**`` for any folders); their order does
                not matter. What a pattern finds is treated like what is found in a folder.
            text_column: the column of JSON and Parquet files that holds the text.
            skip_unreadable: leave a file at the first fault in it and go on with the next one, instead of raising.
            group_by: column of JSON and Parquet files that names a record's group.
            chat: writes conversations; without one they are errors.

        Raises:
            UserError: no paths, a path that does not exist or is neither a folder nor a regular file, a pattern that
                matches nothing, a suffix that is not supported, no file at all, a folder that cannot be listed, groups
                asked of a text file.
        """
        super().__init__()
        self.text_column, self.skip_unreadable, self.group_by = text_column, skip_unreadable, group_by
        self.chat = chat
        check_unicode("text_column", text_column)
        check_unicode("group_by", group_by)
        self.unreadable: dict[Path, str] = {}
        self._closed: set[Path] = set()
        self._before: dict[Path, tuple[int, int]] = {}
        self._bytes_read = 0
        self._columns: Columns | None = None
        found = Found(paths)
        self.left_out, self._unsupported = found.left_out, found.unsupported
        self.files = sorted(found.files.items(), key=lambda item: item[0].as_posix())
        if group_by is not None and (text := next((path for path, kind in self.files if kind == "text"), None)):
            raise UserError(f"{text} has no column {group_by!r} to group by; put texts and groups into a .jsonl file")

    @property
    def names(self) -> list[str]:
        """File names without their folders, in a form that can be printed."""
        return [printable(path.name) for path, _ in self.files]

    def fingerprint(self) -> str:
        """SHA-256 over names, kinds and bytes of all files, the text column and whether faults are skipped.

        Raises:
            UserError: a file that cannot be read.
        """
        group = "" if self.group_by is None else f" by {self.group_by}"
        whole = hashlib.sha256(f"{self.text_column}{' skip' * self.skip_unreadable}{group}".encode())
        for path, kind in self.files:
            try:
                stamp, digest = _stamp(path), sha256(path)
                self._before[path] = stamp
            except OSError as error:
                digest = "unreadable"
                self._give_up(error, path)
            if path in self.unreadable:
                self._closed.add(path)
            whole.update(b"\n" + os.fsencode(path.name) + f"\n{kind}\n{digest}".encode())
        return whole.hexdigest()

    def check_unchanged(self) -> None:
        """Raise a `UserError` if a file has another size or time than when `fingerprint` read it."""
        for path, before in self._before.items():
            try:
                now = _stamp(path)
            except OSError:
                now = None
            if now != before:
                raise UserError(f"{path} changed while being read; prepare the data again")

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents, files sorted by path, records in file order.

        Raises:
            UserError: anything in a file that cannot be read, with the file and, where there is one, the line.
        """
        if self._unsupported:
            skipped["file with an unsupported suffix"] += len(self._unsupported)
        skipped.update(self.left_out.values())
        self._bytes_read = 0
        for path, kind in self.files:
            if path in self._closed:
                skipped["unreadable file"] += 1
                continue
            try:
                yield from self._read(kind, path, skipped)
            except (OSError, UnreadableFile) as error:
                self._give_up(error, path)
                skipped["unreadable file"] += 1
            self._columns = None
            self._bytes_read += self._before.get(path, (0, 0))[0]

    def share_read(self) -> float | None:
        """How much of the bytes of the files `documents` has read; known once `fingerprint` was called."""
        total = sum(size for size, _ in self._before.values())
        here = 0 if self._columns is None else self._columns.position()
        return (self._bytes_read + here) / total if total else None

    def notes(self) -> list[str]:
        """A line for each file or folder that was left out, or left at a fault, so far; at most 20 of each."""
        notes = []
        for lines, rest in (
            ([f"Left out: {printable(path)} ({what})." for path, what in self.left_out.items()], "left out"),
            ([f"Skipped from its first fault on: {why}." for why in self.unreadable.values()], "unreadable"),
        ):
            notes += lines[:_MOST_NAMED]
            if len(lines) > _MOST_NAMED:
                notes.append(f"{len(lines) - _MOST_NAMED} more were {rest}.")
        return notes

    def _read(self, kind: str, path: Path, skipped: Counter[str]) -> Iterator[str]:
        if path.stat().st_size and kind != "text":
            self._columns = Columns(path, self.text_column, skipped, self.group_by, self.chat)
            yield from read_records(path, kind, self._columns)
        elif text := read_text(path):
            yield text
        else:
            skipped["empty file"] += 1

    def _give_up(self, error: OSError | UnreadableFile, path: Path) -> None:
        if isinstance(error, OSError):
            reason = error.strerror or error
            error = UnreadableFile(path, f"cannot read {path}: {reason}; check that it is there and its permissions")
        if not self.skip_unreadable:
            raise error
        self.unreadable[error.path] = str(error)


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
