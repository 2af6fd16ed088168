"""GPT-2: LayerNorm with biases, learned positions, matrices stored as ``[in, out]``, query, key and value in one."""

from typing import Any

from torch import Tensor
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel, GPT2Model

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.models.weights import Part, columns, transposed

STOCK = Classes(GPT2Config, GPT2Block, GPT2Model, GPT2LMHeadModel)
REWIRED = rewired_classes(__name__, STOCK)
GeonormGPT2Config, GeonormGPT2Block, GeonormGPT2Model, GeonormGPT2LMHeadModel = REWIRED


def _without_cross_attention(config: Any) -> None:
    if config.add_cross_attention:
        raise UserError(
            "cannot rewire a GPT-2 with cross-attention, which has no connection of its own; set "
            "add_cross_attention=False in its configuration"
        )


def _qkv(weight: Tensor, config: Any) -> list[Part]:
    return columns(weight, [("query", config.hidden_size), ("key", config.hidden_size), ("value", config.hidden_size)])


ADAPTER = Adapter(
    STOCK,
    REWIRED,
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
    parts={
        r"attn\.c_attn\.weight": _qkv,
        r"attn\.c_proj\.weight": lambda weight, config: transposed(weight, "attention_output"),
        r"mlp\.c_fc\.weight": lambda weight, config: transposed(weight, "mlp_input"),
        r"mlp\.c_proj\.weight": lambda weight, config: transposed(weight, "mlp_output"),
    },
    without=("encoder_hidden_states", "encoder_attention_mask"),
    check=_without_cross_attention,
)
