"""OLMo 2: a norm on the output of each sub-layer, none on its input, and norms on query and key."""

from typing import Any

from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2ForCausalLM, Olmo2Model

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.placements import Placement, create

STOCK = Classes(Olmo2Config, Olmo2DecoderLayer, Olmo2Model, Olmo2ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormOlmo2Config, GeonormOlmo2DecoderLayer, GeonormOlmo2Model, GeonormOlmo2ForCausalLM = REWIRED


def _stock_placement(config: Any) -> Placement:
    return create("output", normalize_entry=False)


ADAPTER = Adapter(
    STOCK,
    REWIRED,
    note="norms on query and key",
    stock_placement=_stock_placement,
    norms={("attention", "output"): "post_attention_layernorm", ("mlp", "output"): "post_feedforward_layernorm"},
)
