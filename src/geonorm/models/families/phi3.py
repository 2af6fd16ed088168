"""Phi 3: Llama's layout with fused projections and dropout on the updates."""

from typing import Any

from torch import Tensor
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3ForCausalLM, Phi3Model

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.models.weights import Part, rows

STOCK = Classes(Phi3Config, Phi3DecoderLayer, Phi3Model, Phi3ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormPhi3Config, GeonormPhi3DecoderLayer, GeonormPhi3Model, GeonormPhi3ForCausalLM = REWIRED


def _qkv(weight: Tensor, config: Any) -> list[Part]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_key_value_heads * head
    return rows(weight, [("query", config.num_attention_heads * head), ("key", shared), ("value", shared)])


def _gate_up(weight: Tensor, config: Any) -> list[Part]:
    size = config.intermediate_size
    return rows(weight, [("mlp_input", size), ("mlp_up", size)], labels=("gate", "up"))


def _dropped(block: Any, sublayer: str, output: Tensor) -> Tensor:
    return (block.resid_attn_dropout if sublayer == "attention" else block.resid_mlp_dropout)(output)


ADAPTER = Adapter(
    STOCK,
    REWIRED,
    note="fused query, key, value and gate, up; dropout on the updates",
    parts={r"self_attn\.qkv_proj\.weight": _qkv, r"mlp\.gate_up_proj\.weight": _gate_up},
    update=_dropped,
)
