"""Gemma 2: a norm before and after each sub-layer, gains stored as their difference from 1."""

from typing import Any

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model

from geonorm.models.adapter import SANDWICH_NORMS, Adapter
from geonorm.models.classes import Classes, rewired_classes
from geonorm.placements import Placement, create

STOCK = Classes(Gemma2Config, Gemma2DecoderLayer, Gemma2Model, Gemma2ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormGemma2Config, GeonormGemma2DecoderLayer, GeonormGemma2Model, GeonormGemma2ForCausalLM = REWIRED


def _stock_placement(config: Any) -> Placement:
    return create("sandwich", normalize_entry=False)


ADAPTER = Adapter(
    STOCK,
    REWIRED,
    note="embeddings times sqrt(d); gain 1 is weight 0; soft caps, no sdpa",
    stock_placement=_stock_placement,
    norms=SANDWICH_NORMS,
    unit_gain=0.0,
)
