"""What geonorm itself has written, told by the record that lies in it, so that it is never taken for text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

UNFINISHED = "unfinished corpus"
# The file that makes a folder what it is, and fields that only we put into one of that name.
_RECORDS = {
    "description.json": ({"fingerprint", "num_tokens", "eos_id"}, "prepared corpus"),
    ".building/key.json": (set(), UNFINISHED),
    "run.json": ({"id", "corpus", "geonorm"}, "training run"),
    "inspection.json": ({"format", "models", "environment"}, "inspection"),
    "conversion.json": ({"model", "to", "settings"}, "converted model"),
    "config.json": ({"model_type", "placement"}, "saved model"),
}
_COMPARISON = "config.yaml"
_COMPARISON_FIELDS = (r"^settings:", r"^corpus_fingerprint:")
# How the file of `geonorm eval --out` begins, and what is in it.
_EVALUATION_START, _EVALUATION = b'{\n "model":', {"model", "class", "placement", "settings", "text", "tasks"}
_MOST_BYTES = 1 << 26


def kind_of_folder(folder: Path) -> str | None:
    """What a folder is if geonorm wrote it, such as ``"prepared corpus"``; else None."""
    for name, (fields, kind) in _RECORDS.items():
        path = folder / name
        # Most folders have none of them, and looking is cheap.
        if path.is_file() and (not fields or fields <= (read_object(path) or {}).keys()):
            return kind
    text = _text(folder / _COMPARISON)
    if text is not None and all(re.search(field, text, re.MULTILINE) for field in _COMPARISON_FIELDS):
        return "comparison"
    return None


def is_evaluation(path: Path) -> bool:
    """Whether a file holds the results of ``geonorm eval``."""
    try:
        with path.open("rb") as file:
            begun = file.read(len(_EVALUATION_START)) == _EVALUATION_START
    except OSError:
        return False
    return begun and (read_object(path) or {}).keys() >= _EVALUATION


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none, or no regular file."""
    try:
        found = json.loads(_text(path) or "null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError):
        return None
