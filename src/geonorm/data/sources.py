"""Which files a user means: paths, folders and patterns to a sorted list of files with a content fingerprint."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from geonorm.data import readers
from geonorm.data.digests import file_digest
from geonorm.errors import UserError

# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html",
    ".htm", ".xml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts",
    ".go", ".rs", ".rb", ".sh", ".jl", ".r", ".lua", ".hs", ".scala", ".swift", ".kt", ".sql",
))
# fmt: on
_KINDS = dict.fromkeys(TEXT_SUFFIXES, "text") | {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}


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


class FileSource:
    """Documents of local files.

    A text file is one document. A ``.jsonl``, ``.json`` or ``.parquet`` file has one document per record. Text and
    JSON files may carry a further suffix ``.xz``, ``.gz`` or ``.zst``. Folders are walked to the bottom, links to
    folders not followed; hidden files and folders are left out, files with other suffixes are skipped and counted.
    A file that is reached twice is read once.

    Attributes:
        files: path and kind of each file, sorted by path.
        unreadable: why a file was given up, by path; filled while reading if ``skip_unreadable`` is set.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        text_column: str = "text",
        skip_unreadable: bool = False,
        group_by: str | None = None,
    ) -> None:
        """Find the files.

        Args:
            paths: files, folders and patterns (``*``, ``?``, ``[...]``, ``**`` for any folders); their order does
                not matter. What a pattern finds is treated like what is found in a folder.
            text_column: the column of JSON and Parquet files that holds the text.
            skip_unreadable: leave a file at the first fault in it and go on with the next one, instead of raising.
            group_by: column of JSON and Parquet files that names a record's group.

        Raises:
            UserError: no paths, a path that does not exist, a pattern that matches nothing, a suffix that is not
                supported, no file at all, a folder that cannot be listed, groups asked of a text file.
        """
        if not paths:
            raise UserError("no data paths given; name at least one file or folder")
        self.text_column, self.skip_unreadable, self.group_by = text_column, skip_unreadable, group_by
        self.unreadable: dict[Path, str] = {}
        self.folder: Path | None = None
        self._unsupported: set[Path] = set()
        self._closed: set[Path] = set()
        self._before: dict[Path, tuple[int, int]] = {}
        found: dict[Path, str] = {}
        for given in paths:
            path = Path(given).expanduser()
            if path.is_dir():
                self._add_folder(path, found)
            elif path.exists():
                found[_checked(path)] = _kind_or_error(path)
            elif glob.has_magic(str(path)):
                self._add_pattern(path, found)
            else:
                raise UserError(f"no such file or folder: {path}; check the path (relative to {Path.cwd()})")
        self.files = sorted(found.items(), key=lambda item: item[0].as_posix())
        if group_by is not None and (text := next((path for path, kind in self.files if kind == "text"), None)):
            raise UserError(f"{text} has no column {group_by!r} to group by; put texts and groups into a .jsonl file")

    @property
    def names(self) -> list[str]:
        """File names without their folders."""
        return [path.name for path, _ in self.files]

    def fingerprint(self) -> str:
        """SHA-256 over names, kinds and bytes of all files, the text column and whether faults are skipped.

        Raises:
            UserError: a file that cannot be read, or a ``.zst`` file that ends too early.
        """
        whole = hashlib.sha256(self._how().encode())
        for path, kind in self.files:
            try:
                stamp, digest = _stamp(path), file_digest(path)
                self._before[path] = stamp
            except OSError as error:
                digest = self._give_up(_no_access(path, error))
            except readers.UnreadableFile as error:
                digest = self._give_up(error)
            if path in self.unreadable:
                self._closed.add(path)
            whole.update(f"\n{path.name}\n{kind}\n{digest}".encode())
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
        for kind, batch in itertools.groupby(self._full(skipped), key=lambda item: item[1]):
            paths = [path for path, _ in batch]
            while paths:
                # All text files of a batch go through one reader, the others through one each.
                taken = paths if kind == "text" else paths[:1]
                try:
                    yield from self._read(kind, taken, skipped)
                    paths = paths[len(taken) :]
                except readers.UnreadableFile as error:
                    self._give_up(error)
                    skipped["unreadable file"] += 1
                    paths = paths[paths.index(error.path) + 1 :]

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

    def _read(self, kind: str, paths: list[Path], skipped: Counter[str]) -> Iterator[str]:
        if kind == "text":
            return readers.read_text(paths)
        read = {"jsonl": readers.read_jsonl, "json": readers.read_json, "parquet": readers.read_parquet}[kind]
        return read(paths[0], self.text_column, skipped, self.group_by)

    def _give_up(self, error: readers.UnreadableFile) -> str:
        if not self.skip_unreadable:
            raise error
        self.unreadable[error.path] = str(error)
        return "unreadable"

    def _add(self, path: Path, found: dict[Path, str]) -> bool:
        kind = _kind(path)
        if kind is None:
            self._unsupported.add(path.resolve())
            return False
        found[_checked(path)] = kind
        return True

    def _add_pattern(self, pattern: Path, found: dict[Path, str]) -> None:
        matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
        if not matches:
            raise UserError(f"nothing matches {pattern}; check the pattern (relative to {Path.cwd()})")
        files = [path for path in matches if path.is_file()]
        readable = [self._add(path, found) for path in files]
        if "**" not in str(pattern):  # that one has named the files inside as well
            readable += [self._walk(path, found) for path in matches if path.is_dir()]
        if not any(readable):
            raise UserError(f"no readable file matches {pattern}; supported suffixes: {_supported()}")

    def _add_folder(self, folder: Path, found: dict[Path, str]) -> None:
        if not self._walk(folder, found):
            raise UserError(f"no readable file in the folder {folder}; supported suffixes: {_supported()}")

    def _walk(self, folder: Path, found: dict[Path, str]) -> bool:
        def cannot_list(error: OSError) -> None:
            reason = error.strerror or error
            raise UserError(f"cannot list the folder {error.filename}: {reason}; check its permissions") from error

        any_readable = False
        for parent, folders, files in os.walk(folder, onerror=cannot_list):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if not name.startswith(".") and self._add(Path(parent, name), found):
                    any_readable = True
        return any_readable


def _no_access(path: Path, error: OSError) -> readers.UnreadableFile:
    reason = error.strerror or error
    return readers.UnreadableFile(path, f"cannot read {path}: {reason}; check that it is there and its permissions")


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _checked(path: Path) -> Path:
    path = path.resolve()
    if "::" in str(path):
        raise UserError(f"{path}: names with `::` cannot be read (they mean a chain of archives); rename it")
    return path


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in readers.COMPRESSIONS:
        kind = _KINDS.get(suffixes[-2]) if len(suffixes) == 2 else None
        # Parquet compresses its own columns, and needs random access.
        return None if kind == "parquet" or path.suffix not in readers.COMPRESSIONS else kind
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
