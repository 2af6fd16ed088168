"""The table of families of models: one row each, and the functions that a row needs where names alone do not do.

A row names the module of transformers and the beginning of the class names, and then where the family differs from
Llama's layout; :class:`geonorm.models.adapter.Adapter` says what can differ. Our classes are attributes of this module,
``Geonorm`` before the stock name.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from geonorm.errors import UserError
from geonorm.models.adapter import ADAPTERS, Adapter, Classes, supported_families
from geonorm.models.compat import register_with_peft
from geonorm.models.rewired import rewired_classes
from geonorm.models.weights import WeightView, interleaved, split, unsplit
from geonorm.placements import Placement, create

SANDWICH_NORMS = {
    ("attention", "input"): "input_layernorm",
    ("attention", "output"): "post_attention_layernorm",
    ("mlp", "input"): "pre_feedforward_layernorm",
    ("mlp", "output"): "post_feedforward_layernorm",
}


def _family(module: str, name: str, **different: Any) -> None:
    """Add a row: ``config``, ``block``, ``model`` and ``causal_lm`` end a class's name, the rest is for the Adapter."""
    ends = {"config": "Config", "block": "DecoderLayer", "model": "Model", "causal_lm": "ForCausalLM"}
    ends |= {key: different.pop(key) for key in ends if key in different}
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    stock = Classes(*(getattr(modeling, f"{name}{end}") for end in ends.values()))
    rewired = rewired_classes(__name__, stock)
    globals().update({kind.__name__: kind for kind in rewired})
    adapter = rewired.block.adapter = Adapter(stock, rewired, **different)
    AutoConfig.register(rewired.config.model_type, rewired.config)
    AutoModel.register(rewired.config, rewired.model)
    AutoModelForCausalLM.register(rewired.config, rewired.causal_lm)
    ADAPTERS.append(adapter)


def _sandwich(config: Any) -> Placement:
    return create("sandwich", normalize_entry=False)


def _neox_placement(config: Any) -> Placement:
    return create("parallel" if config.use_parallel_residual else "pre")


def _neox_qkv(weight: Tensor, config: Any) -> list[WeightView]:
    return interleaved(weight, config.num_attention_heads, ("query", "key", "value"))


def _neox_dropout(block: Any, sublayer: str, output: Tensor) -> Tensor:
    return (block.post_attention_dropout if sublayer == "attention" else block.post_mlp_dropout)(output)


def _gpt2_qkv(weight: Tensor, config: Any) -> list[WeightView]:
    width = config.hidden_size
    return split(weight, [("query", width), ("key", width), ("value", width)], transposed=True)


def _no_cross_attention(config: Any) -> None:
    if config.add_cross_attention:
        raise UserError(
            "cannot rewire a GPT-2 with cross-attention, which has no connection of its own; set "
            "add_cross_attention=False in its configuration"
        )


def _phi3_qkv(weight: Tensor, config: Any) -> list[WeightView]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_key_value_heads * head
    return split(weight, [("query", config.num_attention_heads * head), ("key", shared), ("value", shared)])


def _phi3_gate_up(weight: Tensor, config: Any) -> list[WeightView]:
    size = config.intermediate_size
    return split(weight, [("mlp_input", size), ("mlp_up", size)], labels=("gate", "up"))


def _phi3_dropout(block: Any, sublayer: str, output: Tensor) -> Tensor:
    return (block.resid_attn_dropout if sublayer == "attention" else block.resid_mlp_dropout)(output)


_family("llama", "Llama")
_family("mistral", "Mistral", note="sliding window")
_family("qwen2", "Qwen2", note="biases on query, key, value")
_family("qwen3", "Qwen3", note="norms on query and key")
_family("smollm3", "SmolLM3", note="layers without rotary embedding")
# The multiplier counts as part of the sub-layer in every placement: a placement decides where norms are, not how large
# an update is. A norm on the sub-layer's output undoes it.
_family(
    "granite",
    "Granite",
    note="residual_multiplier is part of the sub-layer",
    update=lambda block, sublayer, output: output * block.residual_multiplier,
)
_family(
    "gemma2",
    "Gemma2",
    note="embeddings times sqrt(d); gain 1 is weight 0; soft caps, no sdpa",
    stock_placement=_sandwich,
    norms=SANDWICH_NORMS,
    unit_gain=0.0,
)
_family(
    "gemma3",
    "Gemma3",
    config="TextConfig",
    model="TextModel",
    note="embeddings times sqrt(d); gain 1 is weight 0; one rotary embedding a layer type; norms on query and key",
    stock_placement=_sandwich,
    norms=SANDWICH_NORMS,
    unit_gain=0.0,
)
_family(
    "olmo2",
    "Olmo2",
    note="norms on query and key",
    stock_placement=lambda config: create("output", normalize_entry=False),
    norms={key: name for key, name in SANDWICH_NORMS.items() if key[1] == "output"},
)
_family(
    "phi3",
    "Phi3",
    note="fused query, key, value and gate, up; dropout on the updates",
    fused={r"self_attn\.qkv_proj\.weight": _phi3_qkv, r"mlp\.gate_up_proj\.weight": _phi3_gate_up},
    update=_phi3_dropout,
)
_family(
    "gpt_neox",
    "GPTNeoX",
    block="Layer",
    note="pre with use_parallel_residual=False; LayerNorm; fused query, key, value; dropout on the updates",
    stock_placement=_neox_placement,
    final_norm="final_layer_norm",
    attention="attention",
    roles={
        r"embed_in\.weight": "embedding",
        r"attention\.dense\.weight": "attention_output",
        r"mlp\.dense_h_to_4h\.weight": "mlp_input",
        r"mlp\.dense_4h_to_h\.weight": "mlp_output",
        r"lm_head\.weight": "head",
        r"norm\.weight": "norm",
    },
    fused={r"attention\.query_key_value\.weight": _neox_qkv},
    update=_neox_dropout,
)
_family(
    "gpt2",
    "GPT2",
    block="Block",
    causal_lm="LMHeadModel",
    note="LayerNorm; learned positions; weights stored as [in, out]; fused query, key, value; no cross-attention",
    blocks="h",
    final_norm="ln_f",
    attention="attn",
    norms={("attention", "input"): "ln_1", ("mlp", "input"): "ln_2"},
    roles={
        r"(wte|wpe)\.weight": "embedding",
        r"lm_head\.weight": "head",
        r"(ln_1|ln_2|ln_f|norm)\.weight": "norm",
    },
    fused={
        r"attn\.c_attn\.weight": _gpt2_qkv,
        r"attn\.c_proj\.weight": lambda weight, config: unsplit(weight, "attention_output", transposed=True),
        r"mlp\.c_fc\.weight": lambda weight, config: unsplit(weight, "mlp_input", transposed=True),
        r"mlp\.c_proj\.weight": lambda weight, config: unsplit(weight, "mlp_output", transposed=True),
    },
    without=("encoder_hidden_states", "encoder_attention_mask"),
    check=_no_cross_attention,
)

register_with_peft(supported_families())
