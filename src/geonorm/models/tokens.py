"""Text as token ids of a trained model: plain text in, ids that the model has an embedding for out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from geonorm.errors import UserError, check_count


def encode_plain(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text in which the spelling of a special token is text.

    Args:
        tokenizer: of transformers; a call of it reads such a spelling as the token itself.
        text: the text.
        add_special_tokens: whether to put around it what the tokenizer puts there by itself.
    """
    return tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False)["input_ids"]


def cut(ids: Sequence[int], length: int, stride: int) -> Iterator[Sequence[int]]:
    """Windows of at most ``length`` ids, each starting ``stride`` after the one before, until all ids were in one."""
    for start in range(0, min(len(ids), max(1, len(ids) - length + stride)), stride):
        yield ids[start : start + length]


def start_id(tokenizer: Any) -> int | None:
    """The token that stands before a text: BOS, or EOS where there is no BOS, or None."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def padding_id(model: Any, tokenizer: Any) -> int | None:
    """The tokenizer's padding token, or its EOS token where it has none or the model has no embedding for it."""
    pad = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None or pad >= num_embeddings(model) else pad


def num_embeddings(model: Any) -> int:
    """Number of ids that a model has an embedding for."""
    return model.get_input_embeddings().num_embeddings


def check_ids(model: Any, ids: Sequence[int] | Tensor, where: str = "the text") -> None:
    """Check that a model has an embedding for every id.

    A tokenizer may know more ids than its model, such as the added tokens of Gemma 3 for images; only text that holds
    one cannot be read.

    Args:
        model: a model of transformers.
        ids: token ids, a list or a tensor of any shape.
        where: what they are of, for the message.

    Raises:
        UserError: the largest id has none.
    """
    rows = num_embeddings(model)
    largest = (int(ids.max()) if ids.numel() else -1) if isinstance(ids, Tensor) else max(ids, default=-1)
    if largest >= rows:
        raise UserError(
            f"{where} has the token id {largest}, but the model has {rows} embeddings; take that token out of the "
            "text, or use the model's own tokenizer"
        )


def max_length(model: Any) -> float:
    """Longest input that a model has positions for, in tokens; infinite where its configuration names none."""
    return getattr(model.config, "max_position_embeddings", None) or math.inf


def check_length(model: Any, length: int | None, default: int, name: str = "the model") -> int:
    """Return ``length`` if a model has so many positions; for None the default, or the model's own limit if lower.

    Raises:
        UserError: names the limit.
    """
    limit = max_length(model)
    length = int(min(default, limit)) if length is None else check_count("length", length)
    if length > limit:
        raise UserError(f"`length` {length} is more than the {limit} positions of {name}; give at most {limit}")
    return length
