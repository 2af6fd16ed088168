"""Which files a user means: paths, folders and patterns to regular files of text that geonorm did not write itself."""

from __future__ import annotations

import errno
import fnmatch
import glob
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from geonorm.data.raw import COMPRESSIONS, read_object
from geonorm.errors import UserError

# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html",
    ".htm", ".xml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts",
    ".go", ".rs", ".rb", ".sh", ".jl", ".r", ".lua", ".hs", ".scala", ".swift", ".kt", ".sql",
))
# fmt: on
_KINDS = dict.fromkeys(TEXT_SUFFIXES, "text") | {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
_UNFINISHED = "unfinished corpus"
# The file that makes a folder what it is, and fields that only we put into one of that name.
_RECORDS = {
    "description.json": ({"fingerprint", "num_tokens", "eos_id"}, "prepared corpus"),
    ".building/key.json": (set(), _UNFINISHED),
    "run.json": ({"id", "corpus", "geonorm"}, "training run"),
    "inspection.json": ({"format", "models", "environment"}, "inspection"),
    "conversion.json": ({"model", "to", "settings"}, "converted model"),
    "config.json": ({"model_type", "placement"}, "saved model"),
}
_COMPARISON, _COMPARISON_FIELDS = "config.yaml", (r"^settings:", r"^corpus_fingerprint:")
# How the file of `geonorm eval --out` begins, and what is in it.
_EVALUATION_START, _EVALUATION = b'{\n "model":', {"model", "class", "placement", "settings", "text", "tasks"}


class Found:
    """What paths lead to; what stands in a folder or pattern, but is no text, is left out.

    Attributes:
        files: kind of each file: ``"text"``, ``"jsonl"``, ``"json"`` or ``"parquet"``.
        left_out: what a path is that would have been read if it were a file of text, such as ``"pipe"``.
        unsupported: files with another suffix.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """Look.

        Raises:
            UserError: as :class:`geonorm.data.sources.FileSource`.
        """
        if not paths:
            raise UserError("no data paths given; name at least one file or folder")
        self.files: dict[Path, str] = {}
        self.left_out: dict[Path, str] = {}
        self.unsupported: set[Path] = set()
        self._outputs: dict[Path, str | None] = {}
        for given in paths:
            path = Path(given).expanduser()
            if path.is_dir():
                if not self._walk(path):
                    raise UserError(f"no readable file in the folder {path}{self._found_instead()}")
            elif os.path.lexists(path):
                if (what := _what_else(path)) is not None:
                    raise UserError(f"{path} is a {what}; only regular files are read, so give one")
                if (kind := _kind(path)) is None:
                    name = "".join(path.suffixes[-2:]) or "no suffix"
                    raise UserError(f"cannot read {path} ({name}); supported suffixes: {_supported()}")
                self.files[_real(path)] = kind
            elif glob.has_magic(str(path)):
                self._add_pattern(path)
            else:
                raise UserError(f"no such file or folder: {path}; check the path (relative to {Path.cwd()})")

    def _add(self, path: Path) -> bool:
        kind = _kind(path)
        if kind is None:
            self.unsupported.add(_real(path))
            return False
        what = _what_else(path) or ("result of geonorm eval" if kind == "json" and _is_evaluation(path) else None)
        if what is not None:
            self.left_out[path.absolute()] = what
            return False
        self.files[_real(path)] = kind
        return True

    def _add_pattern(self, pattern: Path) -> None:
        fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
        root, wild = Path(*fixed), pattern.parts[len(fixed) :]
        matches = list(self._matches(root, wild, pattern))
        if not matches and not self.left_out:
            raise UserError(f"nothing matches {pattern}; check the pattern (relative to {Path.cwd()})")
        readable = [self._add(path) for path in matches if not path.is_dir()]
        folders = [path for path in matches if path.is_dir() and not self._is_left_out(path)]
        if "**" not in wild:  # that one has named the files inside as well
            readable += [self._walk(path) for path in folders]
        if not any(readable):
            raise UserError(f"no readable file matches {pattern}{self._found_instead()}")

    def _matches(self, root: Path, wild: tuple[str, ...], pattern: Path) -> Iterator[Path]:
        """What a pattern finds below ``root``, hidden names and left out folders apart."""
        shown = [part for part in wild if part.startswith(".")]
        # The module glob would follow links from `**`, for ever where one leads upwards.
        try:
            found = sorted(root.glob("/".join([*wild, "*"] if wild[-1] == "**" else wild)))
        except ValueError as error:
            raise UserError(f"cannot read the pattern {pattern} ({error}); `**` stands alone between slashes") from None
        for path in found:
            inner = path.relative_to(root).parts
            hidden = any(
                part.startswith(".") and not any(fnmatch.fnmatch(part, one) for one in shown) for part in inner
            )
            if not hidden and not any(map(self._is_left_out, reversed(path.parents[: len(inner)]))):
                yield path

    def _found_instead(self) -> str:
        few = [f"{path} ({what})" for path, what in itertools.islice(self.left_out.items(), 3)]
        return f"; left out: {', '.join(few)}" * bool(few) + f"; supported suffixes: {_supported()}"

    def _walk(self, folder: Path) -> bool:
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
                if not name.startswith(".") and self._add(Path(parent, name)):
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
            self._outputs[folder] = _kind_of_output(folder)
        # What an interrupted command left is as good as hidden: named, it would make a difference to the next one.
        if (kind := self._outputs[folder]) not in (None, _UNFINISHED):
            self.left_out[folder] = f"{kind} of geonorm"
        return kind is not None


def _kind_of_output(folder: Path) -> str | None:
    """What a folder is if geonorm wrote it, such as ``"prepared corpus"``; else None."""
    for name, (fields, kind) in _RECORDS.items():
        path = folder / name
        # Most folders have none of them, and looking is cheap.
        if path.is_file() and (not fields or fields <= (read_object(path) or {}).keys()):
            return kind
    try:
        text = (folder / _COMPARISON).read_text(encoding="utf-8") if (folder / _COMPARISON).is_file() else ""
    except (OSError, ValueError):
        return None
    return "comparison" if all(re.search(field, text, re.MULTILINE) for field in _COMPARISON_FIELDS) else None


def _is_evaluation(path: Path) -> bool:
    """Whether a file holds the results of ``geonorm eval``."""
    try:
        with path.open("rb") as file:
            begun = file.read(len(_EVALUATION_START)) == _EVALUATION_START
    except OSError:
        return False
    return begun and (read_object(path) or {}).keys() >= _EVALUATION


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


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = _KINDS.get(suffixes[-2]) if len(suffixes) == 2 else None
        # Parquet compresses its own columns, and needs random access.
        return None if kind == "parquet" or path.suffix not in COMPRESSIONS else kind
    return _KINDS.get(suffixes[-1]) if suffixes else None


def _supported() -> str:
    return (
        f"{' '.join(sorted(TEXT_SUFFIXES))} (one document per file), .jsonl .json .parquet (one per record);"
        " all but .parquet also with .xz .gz .zst"
    )
