"""Which files a user means: paths, folders and patterns to a sorted list of files with a content fingerprint."""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from geonorm.data import readers
from geonorm.data.outputs import is_evaluation, kind_of_folder
from geonorm.data.raw import COMPRESSIONS, UnreadableFile, file_digest, read_text
from geonorm.data.turns import ChatTemplate
from geonorm.errors import UserError, check_unicode, printable

# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html",
    ".htm", ".xml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts",
    ".go", ".rs", ".rb", ".sh", ".jl", ".r", ".lua", ".hs", ".scala", ".swift", ".kt", ".sql",
))
# fmt: on
_READERS = {"jsonl": readers.read_jsonl, "json": readers.read_json, "parquet": readers.read_parquet}
_KINDS = dict.fromkeys(TEXT_SUFFIXES, "text") | {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}

_MOST_NAMED = 20


class Source(Protocol):
    """Where documents come from; it can be read more than once and gives the same documents each time.

    Attributes:
        folder: where the source may keep what it read, set before `documents` is called.
    """

    folder: Path | None

    @property
    def names(self) -> list[str]:
        """Names of the parts, for people."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of the raw content and of how it is read; cheaper than reading the documents."""
        ...

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents in a fixed order and count in ``skipped`` what was left out, by reason."""
        ...

    def check_unchanged(self) -> None:
        """Raise a `UserError` if the content changed after `fingerprint`."""
        ...

    def notes(self) -> list[str]:
        """A line for each part that was not read, or not to its end, so far."""
        ...


class FileSource:
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
        if not paths:
            raise UserError("no data paths given; name at least one file or folder")
        self.text_column, self.skip_unreadable, self.group_by = text_column, skip_unreadable, group_by
        check_unicode("text_column", text_column)
        check_unicode("group_by", group_by)
        self.chat = chat
        self.unreadable: dict[Path, str] = {}
        self.left_out: dict[Path, str] = {}
        self.folder: Path | None = None
        self._unsupported: set[Path] = set()
        self._closed: set[Path] = set()
        self._outputs: dict[Path, str | None] = {}
        self._before: dict[Path, tuple[int, int]] = {}
        found: dict[Path, str] = {}
        for given in paths:
            path = Path(given).expanduser()
            if path.is_dir():
                self._add_folder(path, found)
            elif os.path.lexists(path):
                if (what := _what_else(path)) is not None:
                    raise UserError(f"{path} is a {what}; only regular files are read, so give one")
                found[_real(path)] = _kind_or_error(path)
            elif glob.has_magic(str(path)):
                self._add_pattern(path, found)
            else:
                raise UserError(f"no such file or folder: {path}; check the path (relative to {Path.cwd()})")
        self.files = sorted(found.items(), key=lambda item: item[0].as_posix())
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
        whole = hashlib.sha256(self._how().encode())
        for path, kind in self.files:
            try:
                stamp, digest = _stamp(path), file_digest(path)
                self._before[path] = stamp
            except OSError as error:
                digest = self._give_up(_no_access(path, error))
            if path in self.unreadable:
                self._closed.add(path)
            whole.update(b"\n" + os.fsencode(path.name) + f"\n{kind}\n{digest}".encode())
        return whole.hexdigest()

    def _how(self) -> str:
        group = "" if self.group_by is None else f" by {self.group_by}"
        return f"{self.text_column}{' skip' * self.skip_unreadable}{group}"

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
        for path, kind in self._full(skipped):
            try:
                yield from self._read(kind, path, skipped)
            except OSError as error:
                self._give_up(_no_access(path, error))
                skipped["unreadable file"] += 1
            except UnreadableFile as error:
                self._give_up(error)
                skipped["unreadable file"] += 1

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

    def _full(self, skipped: Counter[str]) -> list[tuple[Path, str]]:
        """The files that have something in them."""
        full = []
        for path, kind in self.files:
            if path in self._closed:
                skipped["unreadable file"] += 1
                continue
            try:
                size = path.stat().st_size
            except OSError as error:
                self._give_up(_no_access(path, error))
                skipped["unreadable file"] += 1
                continue
            if size:
                full.append((path, kind))
            else:
                skipped["empty file"] += 1
        return full

    def _read(self, kind: str, path: Path, skipped: Counter[str]) -> Iterator[str]:
        if kind == "text":
            text = read_text(path)
            if not text:
                skipped["empty file"] += 1
                return iter(())
            return iter((text,))
        return _READERS[kind](path, self.text_column, skipped, self.group_by, self.chat)

    def _give_up(self, error: UnreadableFile) -> str:
        if not self.skip_unreadable:
            raise error
        self.unreadable[error.path] = str(error)
        return "unreadable"

    def _add(self, path: Path, found: dict[Path, str]) -> bool:
        kind = _kind(path)
        if kind is None:
            self._unsupported.add(_real(path))
            return False
        what = _what_else(path) or ("result of geonorm eval" if kind == "json" and is_evaluation(path) else None)
        if what is not None:
            self.left_out[path.absolute()] = what
            return False
        found[_real(path)] = kind
        return True

    def _add_pattern(self, pattern: Path, found: dict[Path, str]) -> None:
        matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
        if not matches:
            raise UserError(f"nothing matches {pattern}; check the pattern (relative to {Path.cwd()})")
        # Files deep down as well, where `**` has named them without asking what folder they are in.
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
        files = [path for path in matches if not path.is_dir() and not self._inside_output(path, root)]
        readable = [self._add(path, found) for path in files]
        if "**" not in str(pattern):  # that one has named the files inside as well
            readable += [self._walk(path, found) for path in matches if path.is_dir()]
        if not any(readable):
            raise UserError(f"no readable file matches {pattern}{self._found_instead()}")

    def _add_folder(self, folder: Path, found: dict[Path, str]) -> None:
        if not self._walk(folder, found):
            raise UserError(f"no readable file in the folder {folder}{self._found_instead()}")

    def _found_instead(self) -> str:
        few = [f"{path} ({what})" for path, what in itertools.islice(self.left_out.items(), 3)]
        return f"; left out: {', '.join(few)}" * bool(few) + f"; supported suffixes: {_supported()}"

    def _walk(self, folder: Path, found: dict[Path, str]) -> bool:
        def cannot_list(error: OSError) -> None:
            reason = error.strerror or error
            raise UserError(f"cannot list the folder {error.filename}: {reason}; check its permissions") from error

        if self._is_output(folder):
            return False
        any_readable = False
        for parent, folders, files in os.walk(folder, onerror=cannot_list):
            inner = [Path(parent, name) for name in folders if not name.startswith(".")]
            folders[:] = [path.name for path in inner if not self._is_left_out(path)]
            for name in files:
                if not name.startswith(".") and self._add(Path(parent, name), found):
                    any_readable = True
        return any_readable

    def _is_left_out(self, folder: Path) -> bool:
        if folder.is_symlink():
            self.left_out[folder.absolute()] = "link to a folder"
            return True
        return self._is_output(folder)

    def _is_output(self, folder: Path) -> bool:
        folder = folder.absolute()
        if folder not in self._outputs:
            self._outputs[folder] = kind_of_folder(folder)
        if (kind := self._outputs[folder]) is not None:
            self.left_out[folder] = f"{kind} of geonorm"
        return kind is not None

    def _inside_output(self, path: Path, root: Path) -> bool:
        depth = len(path.parts) - len(root.parts)
        return any(self._is_output(parent) for parent in reversed(path.parents[:depth]))


def _what_else(path: Path) -> str | None:
    """What something is that is no regular file; None for one, and for what only reading can tell."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return {errno.ENOENT: "link to nothing", errno.ELOOP: "link that leads to itself"}.get(error.errno or 0)
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "special file")


def _real(path: Path) -> Path:
    # Unlike resolve(), it takes links that lead to themselves.
    return Path(os.path.realpath(path))


def _no_access(path: Path, error: OSError) -> UnreadableFile:
    reason = error.strerror or error
    return UnreadableFile(path, f"cannot read {path}: {reason}; check that it is there and its permissions")


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = _KINDS.get(suffixes[-2]) if len(suffixes) == 2 else None
        # Parquet compresses its own columns, and needs random access.
        return None if kind == "parquet" or path.suffix not in COMPRESSIONS else kind
    return _KINDS.get(suffixes[-1]) if suffixes else None


def _kind_or_error(path: Path) -> str:
    kind = _kind(path)
    if kind is None:
        name = "".join(path.suffixes[-2:]) or "no suffix"
        raise UserError(f"cannot read {path} ({name}); supported suffixes: {_supported()}")
    return kind


def _supported() -> str:
    return (
        f"{' '.join(sorted(TEXT_SUFFIXES))} (one document per file), .jsonl .json .parquet (one per record);"
        " all but .parquet also with .xz .gz .zst"
    )
