"""GPT-NeoX and Pythia: LayerNorm with biases, query, key and value in one matrix, head by head."""

from typing import Any

from torch import Tensor
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM, GPTNeoXLayer, GPTNeoXModel

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.models.weights import Part, interleaved
from geonorm.placements import Placement, create

STOCK = Classes(GPTNeoXConfig, GPTNeoXLayer, GPTNeoXModel, GPTNeoXForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormGPTNeoXConfig, GeonormGPTNeoXLayer, GeonormGPTNeoXModel, GeonormGPTNeoXForCausalLM = REWIRED


def _stock_placement(config: Any) -> Placement:
    return create("parallel" if config.use_parallel_residual else "pre")


def _qkv(weight: Tensor, config: Any) -> list[Part]:
    return interleaved(weight, config.num_attention_heads, ("query", "key", "value"))


def _dropped(block: Any, sublayer: str, output: Tensor) -> Tensor:
    return (block.post_attention_dropout if sublayer == "attention" else block.post_mlp_dropout)(output)


ADAPTER = Adapter(
    STOCK,
    REWIRED,
    note="pre with use_parallel_residual=False; LayerNorm; fused query, key, value; dropout on the updates",
    stock_placement=_stock_placement,
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
    parts={r"attention\.query_key_value\.weight": _qkv},
    update=_dropped,
)
