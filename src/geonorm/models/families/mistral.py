"""Mistral: Llama's layout with a sliding window."""

from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM, MistralModel

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(MistralConfig, MistralDecoderLayer, MistralModel, MistralForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormMistralConfig, GeonormMistralDecoderLayer, GeonormMistralModel, GeonormMistralForCausalLM = REWIRED

ADAPTER = Adapter(STOCK, REWIRED, note="sliding window")
