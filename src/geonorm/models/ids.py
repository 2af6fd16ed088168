"""Token ids that a model has no embedding for: allowed in a tokenizer, refused where a text has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from geonorm.errors import UserError


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


def padding_id(model: Any, tokenizer: Any) -> int | None:
    """The tokenizer's padding token, or its EOS token where it has none or the model has no embedding for it."""
    pad = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None or pad >= num_embeddings(model) else pad
