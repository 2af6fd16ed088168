"""Windows to calibrate on and windows held out, from different documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from geonorm.data.sources import Source
from geonorm.data.split import TRAIN, VAL, Split, Survey
from geonorm.errors import UserError, check_count
from geonorm.models.tokens import cut, encode_plain

VAL_FRACTION = 0.1

# More than a token takes on average in any text.
_CHARACTERS_A_TOKEN = 16


def split_source(source: Source) -> Split:
    """Decide by document which text is held out; see :mod:`geonorm.data.split`."""
    survey = Survey()
    for text in usable(source):
        survey.add(text)
    return survey.split(VAL_FRACTION)


def usable(source: Source) -> Iterator[str]:
    """Documents that have text."""
    return (text for text in source.documents(Counter()) if text.strip())


def windows_of_side(
    source: Source, split: Split, side: str, tokenizer: Any, *, num_windows: int, length: int
) -> Tensor:
    """Windows of one side of a split, taken from as many documents as there are, in turn.

    A document gives windows without overlap from its start on, encoded as plain text; what is left at its end
    is dropped. From every document its first window is taken, then from every document its second, until there are
    enough.

    Returns:
        int64 ``[num_windows, length]``.

    Raises:
        UserError: the side does not hold so many windows.
    """
    check_count("num_windows", num_windows)
    check_count("length", length, 2)
    parts: list[str] = []
    for text in usable(source):
        for where, part in split.parts(text):
            if where == side and len(parts) < num_windows:
                parts.append(part[: _CHARACTERS_A_TOKEN * length * num_windows])
    # What each document has to give if all give alike, and all that is needed where some are too short for that.
    for share in (-(-num_windows // max(1, len(parts))), num_windows):
        most = _CHARACTERS_A_TOKEN * length * share
        pieces = [cut(encode_plain(tokenizer, part[:most]), length, length) for part in parts]
        documents = [[window for window in windows if len(window) == length] for windows in pieces]
        deepest = max(map(len, documents), default=0)
        rows = [document[turn] for turn in range(deepest) for document in documents if turn < len(document)]
        if len(rows) >= num_windows:
            return torch.tensor(rows[:num_windows])
    name = {TRAIN: "calibrate on", VAL: "hold out"}[side]
    raise UserError(
        f"the text has {len(rows)} windows of {length} tokens to {name}, but {num_windows} are needed; give more text, "
        "or ask for fewer or shorter windows"
    )
