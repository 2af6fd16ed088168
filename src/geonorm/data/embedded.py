"""The default corpus, made of text that is on every machine: Python's own sources and library documentation."""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib.util
import inspect
import sysconfig
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

MAX_BYTES = 24_000_000

# Fixed and short, so that machines with the same versions of these agree; all are dependencies of this package.
_PACKAGES = ("numpy", "torch", "transformers")
_EXTRACTION = 1

_NOT_LIBRARY = frozenset(
    ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip")
)
# Tables and texts that a program wrote, and what differs from one build of Python to the next.
_GENERATED_FOLDERS = frozenset(("encodings", "pydoc_data"))
_GENERATED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-", "build")
_NOT_DOCUMENTATION = frozenset(("__pycache__", "test", "tests", "testing", "_vendor", "vendor", "third_party"))
_SHORTEST_DOCUMENT = 200


class EmbeddedSource:
    """Sources of the standard library, one document per module, then documentation strings, one per module.

    Modules are never imported. Repeated documents and repeated documentation strings are left out. Reading stops
    at 24 MB. What it holds depends on the versions of Python, numpy, torch and transformers; the description of
    the corpus carries a fingerprint to compare.
    """

    def __init__(self) -> None:
        self._library = list(_library_files())
        self._packages = {name: list(_package_files(name)) for name in _PACKAGES}
        self._kept: list[str] = []
        self._rest = self._collect()
        self._skipped: Counter[str] = Counter()
        self.folder: Path | None = None

    @property
    def names(self) -> list[str]:
        """What it is made of."""
        found = [name for name, files in self._packages.items() if files]
        return ["standard library sources"] * bool(self._library) + [f"documentation of {name}" for name in found]

    def fingerprint(self) -> str:
        """SHA-256 over names and bytes of every file that may be read."""
        whole = hashlib.sha256(f"embedded {_EXTRACTION} {MAX_BYTES}".encode())
        for files in (self._library, *self._packages.values()):
            for name, path in files:
                whole.update(f"\n{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        return whole.hexdigest()

    def check_unchanged(self) -> None:
        """Nothing to check: every pass gives what the first one read."""

    def notes(self) -> list[str]:
        """None: what does not parse is counted."""
        return []

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents, one pass at a time; they are kept (at most 24 MB), as parsing takes seconds."""
        yield from self._kept
        while True:
            with _no_garbage_collection():
                text = next(self._rest, None)
            for reason, count in self._skipped.items():
                skipped[reason] = count
            if text is None:
                return
            self._kept.append(text)
            yield text

    def _collect(self) -> Iterator[str]:
        seen: set[bytes] = set()
        total = 0
        for text in self._candidates():
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                self._skipped["repeated embedded document"] += 1
                continue
            seen.add(digest)
            total += len(text.encode())
            if total > MAX_BYTES:
                return
            yield text

    def _candidates(self) -> Iterator[str]:
        for _, path in self._library:
            text = self._read(path)
            if text.strip():
                yield text
        seen: set[bytes] = set()
        for files in self._packages.values():
            for _, path in files:
                text = "\n\n".join(self._new_docstrings(self._read(path), seen))
                if len(text) >= _SHORTEST_DOCUMENT:
                    yield text + "\n"

    def _read(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self._skipped["embedded file in another encoding"] += 1
            return ""

    def _new_docstrings(self, source: str, seen: set[bytes]) -> Iterator[str]:
        try:
            found = list(docstrings(source))
        except (SyntaxError, ValueError):
            self._skipped["embedded file that does not parse"] += 1
            return
        for text in found:
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
            # Escapes in a source can spell lone surrogates, which are not text.
            if digest not in seen and not any("\ud800" <= character <= "\udfff" for character in text):
                seen.add(digest)
                yield text


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # Syntax trees are large and free of cycles: scanning them over and over takes two thirds of the parsing time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def docstrings(source: str) -> Iterator[str]:
    """Yield the documentation strings of a module, its classes and functions, in the order of the source.

    Args:
        source: Python source; it is parsed, never run.

    Raises:
        SyntaxError: it does not parse.
    """
    if '"""' not in source and "'''" not in source:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's sources
        waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                text = first.value.value
                if isinstance(text, str) and text.strip():
                    yield inspect.cleandoc(text)
        # Only statements can hold definitions; expressions are most of the tree.
        blocks = (getattr(node, name, ()) for name in ("body", "orelse", "handlers", "finalbody"))
        inner = [child for block in blocks if isinstance(block, list) for child in block]
        waiting.extend(reversed(inner))


def library_documentation() -> Iterator[str]:
    """Yield the documentation of the standard library as text, one document per module that has some.

    Modules are read, never imported; what cannot be read or parsed is left out.
    """
    for _, path in _library_files():
        try:
            text = "\n\n".join(docstrings(path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if len(text) >= _SHORTEST_DOCUMENT:
            yield text


def _library_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name, path in _python_files(root, _NOT_LIBRARY | _GENERATED_FOLDERS):
        if not any(part.startswith(_GENERATED_PREFIXES) for part in Path(name).parts):
            yield name, path


def _package_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)  # of a top-level name: finds it without importing it
    for root in (spec.submodule_search_locations if spec else None) or ():
        for name, path in _python_files(Path(root), _NOT_DOCUMENTATION):
            yield f"{package}/{name}", path


def _python_files(root: Path, excluded: frozenset[str]) -> list[tuple[str, Path]]:
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if excluded.isdisjoint(relative.parts[:-1]) and path.is_file():
            found.append((relative.as_posix(), path))
    return sorted(found)
