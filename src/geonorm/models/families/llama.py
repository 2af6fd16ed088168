"""Llama."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from geonorm.models.adapter import Adapter
from geonorm.models.blocks import RewiredBlock
from geonorm.models.pretrained import RewiredConfigMixin, RewiredModelMixin


class GeonormLlamaConfig(RewiredConfigMixin, LlamaConfig):
    """Llama's configuration with a placement."""

    model_type = "geonorm_llama"

    placement: str = "geonorm"
    placement_options: dict[str, Any] | None = None


class GeonormLlamaDecoderLayer(RewiredBlock, LlamaDecoderLayer):
    """Llama's block with the placement's connections."""


class GeonormLlamaModel(RewiredModelMixin, LlamaModel):
    """Llama without a head, with a placement."""

    config_class = GeonormLlamaConfig
    _no_split_modules: ClassVar = ["GeonormLlamaDecoderLayer"]


class GeonormLlamaForCausalLM(RewiredModelMixin, LlamaForCausalLM):
    """Llama with a language-model head and a placement."""

    config_class = GeonormLlamaConfig
    _no_split_modules: ClassVar = ["GeonormLlamaDecoderLayer"]


ADAPTER = Adapter(
    family="llama",
    stock={"block": LlamaDecoderLayer, "model": LlamaModel, "causal_lm": LlamaForCausalLM},
    rewired={
        "config": GeonormLlamaConfig,
        "block": GeonormLlamaDecoderLayer,
        "model": GeonormLlamaModel,
        "causal_lm": GeonormLlamaForCausalLM,
    },
    blocks="layers",
    final_norm="norm",
    attention="self_attn",
    mlp="mlp",
    norms={("attention", "input"): "input_layernorm", ("mlp", "input"): "post_attention_layernorm"},
    roles={
        r"embed_tokens\.weight": "embedding",
        r"self_attn\.q_proj\.weight": "query",
        r"self_attn\.k_proj\.weight": "key",
        r"self_attn\.v_proj\.weight": "value",
        r"self_attn\.o_proj\.weight": "attention_output",
        r"mlp\.(gate|up)_proj\.weight": "mlp_input",
        r"mlp\.down_proj\.weight": "mlp_output",
        r"lm_head\.weight": "head",
        r"layernorm\.weight": "norm",
    },
)
