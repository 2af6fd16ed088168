"""Gemma 3, the text model: a norm before and after each sub-layer, gains stored as their difference from 1."""

from typing import Any

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM, Gemma3TextModel

from geonorm.models.adapter import SANDWICH_NORMS, Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.placements import Placement, create

STOCK = Classes(Gemma3TextConfig, Gemma3DecoderLayer, Gemma3TextModel, Gemma3ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormGemma3TextConfig, GeonormGemma3DecoderLayer, GeonormGemma3TextModel, GeonormGemma3ForCausalLM = REWIRED


def _stock_placement(config: Any) -> Placement:
    return create("sandwich", normalize_entry=False)


ADAPTER = Adapter(
    STOCK,
    REWIRED,
    note="embeddings times sqrt(d); gain 1 is weight 0; one rotary embedding a layer type; norms on query and key",
    stock_placement=_stock_placement,
    norms=SANDWICH_NORMS,
    unit_gain=0.0,
)
