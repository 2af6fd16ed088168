"""Text drawn from a model while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geonorm.training.config import SamplingConfig
from geonorm.training.evaluation import autocast, undisturbed

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
            draw: dict[str, Any] = {"do_sample": False}
            if sampling.temperature > 0:
                draw = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0}
            out = model.generate(  # type: ignore[operator]
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=room,
                use_cache=True,
                pad_token_id=0,
                **draw,
            )
            texts.append({"prompt": prompt, "text": tokenizer.decode(out[0, len(ids) :].tolist())})
    return texts
