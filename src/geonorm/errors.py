"""What a user did wrong, said in one line: the base of every error that geonorm raises on purpose."""

from __future__ import annotations

import difflib
import math
import numbers
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# More than this fits no count of anything here, and 32-bit sizes end at it.
MAX_COUNT = 2**31 - 1
# Torch takes no larger ones.
MAX_SEED = 2**63 - 1


class UserError(ValueError):
    """A mistake in the input that the message names, with its place and its remedy.

    The command line prints it as one line and exits with code 2; any other exception is a bug and keeps its
    traceback. What cannot be printed, such as a byte of a file name that is not UTF-8, stands as an escape.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: object) -> str:
    """Text with escapes for what cannot be printed on one line of UTF-8.

    Names of files may hold any byte; Python has those that are not UTF-8 as lone surrogates, which no stream, log or
    JSON file of other programs takes. They stand as ``\\xe9`` and the like, line ends as ``\\n``.
    """

    def shown(character: str) -> str:
        if character.isprintable():
            return character
        if "\udc80" <= character <= "\udcff":
            return f"\\x{ord(character) - 0xDC00:02x}"
        return character.encode("unicode_escape").decode()

    return "".join(map(shown, str(text)))


def check_unicode(name: str, value: object) -> None:
    """Check that text or a path that a user gave is Unicode: libraries below take nothing else.

    Raises:
        UserError: `` `name` value is not UTF-8 ``.
    """
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"`{name}` {value} is not UTF-8; give it in UTF-8, or rename the file or folder") from None


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Error for a name that is not in a table: lists what is known and suggests the nearest.

    Args:
        kind: what the name stands for, such as ``"placement"``.
        name: what the user gave.
        known: every name that would have been accepted.
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")


def plain(name: str, value: object) -> Any:
    """Return a value as Python's own None, bool, int, float or str, or a list of them, so that it can be saved.

    Numbers, arrays and tensors of other libraries give their values, a tuple becomes a list.

    Raises:
        UserError: names the value, if it is something else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # Of a subclass such as an enumeration the text, not what it shows itself as.
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    try:
        if isinstance(value, numbers.Real):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        if hasattr(value, "tolist"):
            return plain(name, value.tolist())  # type: ignore[attr-defined]
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"`{name}` holds no plain value: a {type(value).__name__} ({first_line(error)})") from error
    raise UserError(f"`{name}` must be a number, true, false, text or a list of them, got a {type(value).__name__}")


def first_line(error: BaseException, *, with_class: bool = False) -> str:
    """First line of an exception's message; its class before it if asked for, or where that says nothing alone."""
    text, name = str(error).strip(), type(error).__name__
    if not text or isinstance(error, KeyError):
        return f"{name} {text}".strip()
    line = text.splitlines()[0].rstrip(" :;")
    return f"{name}: {line}" if with_class else line


def disk_reason(error: BaseException) -> str | None:
    """Why the system did not write or read, in its own words; None for an error of another kind.

    Libraries in Rust raise errors of their own for it, which end in ``(os error 28)``.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"([^:\n]+) \(os error \d+\)", str(error))
    return found.group(1).strip() if found else None


def check_positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a finite number above zero.

    Raises:
        UserError: `` `name` must be positive, got value ``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UserError(f"`{name}` must be a positive number, got {value!r}")
    # One chained comparison, false for NaN too, because torch.compile cannot trace math.isfinite of a changing number.
    if not 0 < value < math.inf or (isinstance(value, numbers.Rational) and value > sys.float_info.max):
        raise UserError(f"`{name}` must be positive, got {value}")
    return float(value)


def check_count(name: str, value: int, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return ``value`` if it is a whole number from ``minimum`` to ``maximum``.

    Raises:
        UserError: `` `name` must be a whole number of at least minimum, got value ``, or the same of the maximum.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise UserError(f"`{name}` must be a whole number of at least {minimum}, got {value!r}")
    if value > maximum:
        raise UserError(f"`{name}` must be at most {maximum}, got {value}")
    return int(value)


def check_folder_path(name: str, path: Path) -> None:
    """Check that a folder is at a path or can be made there.

    Raises:
        UserError: `` `name` path is or lies in a file ``, or the path is not UTF-8.
    """
    check_unicode(name, path.absolute())
    existing = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not existing.is_dir():
        raise UserError(f"`{name}` {path} is or lies in a file, {existing}; name a folder")
