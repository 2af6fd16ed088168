"""Text that is on every machine: the sources of Python's own library, and its documentation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

from geonorm.data.records import Document
from geonorm.data.sources import Source

_EXTRACTION = 2

# Others than the library's own, and tables and texts that a program wrote.
_NOT_LIBRARY = frozenset(
    (
        *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
        *("ensurepip", "encodings", "pydoc_data"),
    )
)
# What differs from one build of Python to the next.
_GENERATED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-", "build")
_SHORTEST_DOCUMENT = 200


class StandardLibrarySource(Source):
    """Sources of the standard library, one document a module, one group a top-level module or package.

    Modules are never imported, and repeated ones are left out. A package quotes itself far more than others, so it
    stays on one side of a split. What it holds depends on the version of Python; the description of the corpus carries
    a fingerprint to compare. Nobody edits these files while they are read, so `check_unchanged` checks nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files = list(_library_files())

    @property
    def names(self) -> list[str]:
        """What it is made of."""
        return ["standard library sources"]

    def fingerprint(self) -> str:
        """SHA-256 over names and bytes of every file that may be read."""
        # The word is part of the keys of caches that are there already.
        whole = hashlib.sha256(f"embedded {_EXTRACTION}".encode())
        for name, path in self._files:
            whole.update(f"\n{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        return whole.hexdigest()

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents."""
        seen: set[bytes] = set()
        for name, path in self._files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                skipped["module in another encoding"] += 1
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                skipped["repeated module"] += 1
            elif text.strip():
                seen.add(digest)
                yield Document(text, name.split("/")[0].removesuffix(".py"))


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
            text = ast.get_docstring(node, clean=False)
            if text is not None and text.strip():
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


def _library_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        generated = any(part.startswith(_GENERATED_PREFIXES) for part in parts)
        if _NOT_LIBRARY.isdisjoint(parts[:-1]) and not generated and path.is_file():
            found.append((Path(*parts).as_posix(), path))
    return sorted(found)
