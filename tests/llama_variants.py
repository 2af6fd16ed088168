"""Small Llama models, stock and rewired, in every placement and some of its options."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from geonorm.models import rewire
from geonorm.models.families import GeonormLlamaForCausalLM
from geonorm.placements import available

VARIANTS = {
    **{name: (name, {}) for name in available()},
    "geonorm learnable": ("geonorm", {"learnable": True, "decay": "sqrt", "normalize_update": True}),
    "geonorm cayley": ("geonorm", {"retraction": "cayley", "per": "sublayer", "max_angle": None}),
    "geonorm limit first": ("geonorm", {"max_update_angle": 0.5, "learnable_angle": True, "max_angle": 0.6}),
    "geonorm step by step": ("geonorm", {"alphas": [0.9, 0.4, 0.7, 0.2, 0.5, 0.1]}),
    "pre normalised entry": ("pre", {"normalize_entry": True}),
    "pre with options": ("pre", {"gain": "channel", "gain_start": 0.5, "entry_skip": True, "norm": "dyt"}),
    "parallel with options": ("parallel", {"gain": "scalar", "entry_skip": True, "norm": "layernorm"}),
    "attnres in blocks": ("attnres", {"block_size": 4}),
    "mixture layer by layer": ("mix", {"layers": ["parallel", "nag", "scaled_sandwich"], "entry_skip": True}),
}


def stock_config(**changes) -> LlamaConfig:
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**settings, **changes})


def stock_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(stock_config(**changes)).eval()


def rewired(variant: str, seed: int = 0, **changes) -> GeonormLlamaForCausalLM:
    """A rewired model whose every parameter, gains and step sizes included, is off its initial value."""
    name, options = VARIANTS[variant]
    model = rewire(stock_model(seed, **changes), name, init=True, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def plain_settings(config: LlamaConfig) -> dict:
    skipped = ("model_type", "architectures", "transformers_version", "dtype")
    return {key: value for key, value in config.to_dict().items() if key not in skipped}
