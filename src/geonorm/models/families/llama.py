"""Llama."""

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(LlamaConfig, LlamaDecoderLayer, LlamaModel, LlamaForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormLlamaConfig, GeonormLlamaDecoderLayer, GeonormLlamaModel, GeonormLlamaForCausalLM = REWIRED

ADAPTER = Adapter(STOCK, REWIRED)
