"""Tiny models of every family, with what is special about the family switched on."""

from __future__ import annotations

import torch

from geonorm.models import rewire
from geonorm.models.adapter import ADAPTERS
from geonorm.placements import available

VOCABULARY = 64
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
GEMMA["layer_types"] = ["sliding_attention", "full_attention"]
MULTIPLIERS = {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 4.0}

SPECIAL = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA,
    "olmo2": GROUPED,
    "gpt2": {"n_inner": 48},
    "gpt_neox": {"intermediate_size": 48},
    "gpt_neox sequential": {"intermediate_size": 48, "use_parallel_residual": False},
    "phi3": {**GROUPED, "original_max_position_embeddings": 64},
    "granite": {**GROUPED, **MULTIPLIERS, "logits_scaling": 2.0},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
}
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "phi3": ("resid_pdrop", "attention_dropout"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
}
FAMILIES = list(SPECIAL)
# Those that every family is checked in, which takes minutes; the newer ones where they meet something new.
PLACEMENTS = [
    name for name in available() if name in ("geonorm", "pre", "post", "deepnorm", "sandwich", "output", "parallel")
]
NEWER = [name for name in available() if name not in PLACEMENTS]
# Families that keep in one weight what a placement works on by itself; docs/families.md has the same table.
REFUSED = {
    "hybrid": (["gpt2", "gpt_neox", "gpt_neox sequential", "phi3"], "query, key, value"),
    "ngpt": (["phi3"], "mlp_input, mlp_up"),
}


def is_refused(family: str, placement: str) -> bool:
    return family in REFUSED.get(placement, ([], ""))[0]


def adapter_of(family: str):
    return next(adapter for adapter in ADAPTERS if adapter.family == family.split()[0])


def stock_config(family: str, dropout: float = 0.0, **changes):
    settings = {**COMMON, **SPECIAL[family], **dict.fromkeys(DROPOUT.get(family.split()[0], ()), dropout), **changes}
    return adapter_of(family).stock.config(**settings)


def stock_model(family: str, seed: int = 0, **changes):
    """A stock model whose every parameter, biases and gains included, is off its initial value."""
    torch.manual_seed(seed)
    return moved(adapter_of(family).stock.causal_lm(stock_config(family, **changes)), seed + 1).eval()


def moved(model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def rewired_model(family: str, placement: str, seed: int = 0, options=None, **changes):
    """A rewired model whose every parameter, gains and step sizes included, is off its initial value."""
    model = rewire(stock_model(family, seed, **changes), placement, init=True, **(options or {}))
    return moved(model, seed + 1).eval()


def prompts(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
