"""Granite: Llama's layout with multipliers on embedding, attention, updates and logits.

The multiplier on the updates counts as part of the sub-layer in every placement: a placement decides where norms are,
not how large an update is. A norm on the sub-layer's output undoes it.
"""

from typing import Any

from torch import Tensor
from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import GraniteDecoderLayer, GraniteForCausalLM, GraniteModel

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(GraniteConfig, GraniteDecoderLayer, GraniteModel, GraniteForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormGraniteConfig, GeonormGraniteDecoderLayer, GeonormGraniteModel, GeonormGraniteForCausalLM = REWIRED


def _multiplied(block: Any, sublayer: str, output: Tensor) -> Tensor:
    return output * block.residual_multiplier


ADAPTER = Adapter(STOCK, REWIRED, note="residual_multiplier is part of the sub-layer", update=_multiplied)
