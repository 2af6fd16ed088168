"""Text drawn from a model while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geonorm.models.continuation import continue_ids
from geonorm.training.config import SamplingConfig
from geonorm.training.validation import autocast, undisturbed

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def sample(
    model: nn.Module, tokenizer: Tokenizer, sampling: SamplingConfig, *, length: int, precision: str, seed: int
) -> list[dict[str, Any]]:
    """Continue each prompt; the run's random stream is as it was afterwards.

    Args:
        model: a language model; every rank calls this where it is cut over them.
        tokenizer: of the corpus, which reads a prompt as plain text, spellings of special tokens too.
        sampling: prompts, number of tokens, temperature.
        length: longest input of the model, in tokens; a text ends there.
        precision: ``"fp32"`` or ``"bf16"``.
        seed: of the draws.

    Returns:
        ``{"prompt": ..., "text": ...}`` a prompt, the text without the prompt.
    """
    device = next(model.parameters()).device
    texts = []
    with undisturbed(model), autocast(device, precision):
        torch.manual_seed(seed)
        for prompt in sampling.prompts:
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids[-(length - 1) :]
            room = min(sampling.tokens, length - len(ids))
            given = torch.tensor([ids], device=device)
            out = continue_ids(model, given, room, temperature=sampling.temperature)
            texts.append({"prompt": prompt, "text": tokenizer.decode(out[0, len(ids) :].tolist())})
    return texts
