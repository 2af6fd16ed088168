"""Continue token ids with a language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def continue_ids(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    num_beams: int = 1,
    eos: int | list[int] | None = None,
    pad: int | None = 0,
    streamer: Any = None,
) -> Tensor:
    """Write on after token ids; torch's global generator gives the draws.

    Args:
        model: a decoder with a language-model head, stock or rewired.
        ids: int64 ``[batch, tokens]``, at least one token each, on the model's device; none of it is padding.
        max_new_tokens: most tokens after them.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: draw from the likeliest tokens whose probabilities reach this sum.
        num_beams: beams to search with.
        eos: ids that end a text; None for those that the model's own generation configuration names.
        pad: id that fills up texts of a batch that ended.
        streamer: of transformers, is given the tokens as they come.

    Returns:
        int64 ``[batch, tokens and new tokens]``.
    """
    from transformers import GenerationConfig

    # top_k left at its default would cut to the 50 likeliest tokens, which nobody asked for.
    draw: dict[str, Any] = {"do_sample": False, "top_k": None}
    if temperature > 0:
        draw = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    # A configuration of its own, so that penalties and the like that came with a model do not count.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        eos_token_id=model.generation_config.eos_token_id if eos is None else eos,
        pad_token_id=pad,
        use_cache=True,
        **draw,
    )
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
