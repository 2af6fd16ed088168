"""Files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file aside and rename it into place; a crash leaves the old file or the new one, never a part.

    A name of a file that is not UTF-8, quoted in the text, stands with escapes.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # That of a write names no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON with :func:`write_text`; NaN and infinity become null."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, at any depth, because JSON has no word for them; arrays become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
