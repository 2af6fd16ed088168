"""Which files a user means: paths and folders to a sorted list of readable files with a content fingerprint."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from geonorm.data import readers
from geonorm.errors import UserError

# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html",
    ".htm", ".xml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts",
    ".go", ".rs", ".rb", ".sh", ".jl", ".r", ".lua", ".hs", ".scala", ".swift", ".kt", ".sql",
))
# fmt: on
_KINDS = dict.fromkeys(TEXT_SUFFIXES, "text") | {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
_READ_BLOCK = 1 << 20


class Source(Protocol):
    """Where documents come from; it can be read more than once and gives the same documents each time."""

    @property
    def names(self) -> list[str]:
        """Names of the parts, for people."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of the raw content and of how it is read; cheaper than reading the documents."""
        ...

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yield the documents in a fixed order and count in ``skipped`` what was left out, by reason."""
        ...


class FileSource:
    """Documents of local files.

    A text file is one document. A ``.jsonl``, ``.json`` or ``.parquet`` file has one document per record. Text and
    JSON files may carry a further suffix ``.xz``, ``.gz`` or ``.zst``. Folders are walked to the bottom; hidden
    files and folders are left out, files with other suffixes are skipped and counted.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], text_column: str = "text") -> None:
        """Find the files.

        Args:
            paths: files and folders; the order does not matter.
            text_column: the column of JSON and Parquet files that holds the text.

        Raises:
            UserError: no paths, a path that does not exist, a suffix that is not supported, no file at all.
        """
        if not paths:
            raise UserError("no data paths given; name at least one file or folder")
        self.text_column = text_column
        self._unsupported = 0
        found: dict[Path, str] = {}
        for given in paths:
            path = Path(given).expanduser()
            if path.is_dir():
                self._add_folder(path, found)
            elif path.exists():
                found[_checked(path)] = _kind_or_error(path)
            else:
                raise UserError(f"no such file or folder: {path}; check the path (relative to {Path.cwd()})")
        self.files = sorted(found.items(), key=lambda item: item[0].as_posix())

    @property
    def names(self) -> list[str]:
        """File names without their folders."""
        return [path.name for path, _ in self.files]

    def fingerprint(self) -> str:
        """SHA-256 over names, kinds and bytes of all files and the text column.

        Raises:
            UserError: a file that cannot be read, or a ``.zst`` file that ends too early.
        """
        whole = hashlib.sha256(self.text_column.encode())
        for path, kind in self.files:
            try:
                whole.update(f"\n{path.name}\n{kind}\n{_digest(path)}".encode())
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
        return whole.hexdigest()

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yield the documents, files sorted by path, records in file order.

        Raises:
            UserError: anything in a file that cannot be read, with the file and, where there is one, the line.
        """
        if self._unsupported:
            skipped["file with an unsupported suffix"] += self._unsupported
        for kind, group in itertools.groupby(self.files, key=lambda item: item[1]):
            paths = [path for path, _ in group]
            if kind == "text":
                yield from readers.read_text(paths, skipped)
                continue
            read = {"jsonl": readers.read_jsonl, "json": readers.read_json, "parquet": readers.read_parquet}[kind]
            for path in paths:
                yield from read(path, self.text_column, skipped)

    def _add_folder(self, folder: Path, found: dict[Path, str]) -> None:
        before = len(found)
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(parent, name)
                if name.startswith("."):
                    continue
                kind = _kind(path)
                if kind is None:
                    self._unsupported += 1
                else:
                    found[_checked(path)] = kind
        if len(found) == before:
            raise UserError(f"no readable file in the folder {folder}; supported suffixes: {_supported()}")


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


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    frames = _ZstdFrames(path) if path.suffix == ".zst" else None
    with path.open("rb") as file:
        while block := file.read(_READ_BLOCK):
            digest.update(block)
            if frames is not None:
                frames.feed(block)
    if frames is not None:
        frames.finish()
    return digest.hexdigest()


class _ZstdFrames:
    """Checks that zstd frames are whole: the reader underneath `datasets` takes a cut file for a short one."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"cannot read {path} without the package zstandard; pip install zstandard") from None
        self.path, self.zstandard = path, zstandard
        self.frame = zstandard.ZstdDecompressor().decompressobj()
        self.open = False

    def feed(self, block: bytes) -> None:
        try:
            while block:
                self.open = True
                self.frame.decompress(block)
                if not self.frame.eof:
                    return
                block = self.frame.unused_data
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
                self.open = False
        except self.zstandard.ZstdError as error:
            raise UserError(f"cannot read {self.path}: {error}; repair or remove it") from None

    def finish(self) -> None:
        if self.open:
            raise UserError(f"cannot read {self.path}: the zstd stream ends too early; fetch the file again")
