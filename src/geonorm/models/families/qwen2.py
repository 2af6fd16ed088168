"""Qwen 2 and 2.5: Llama's layout with biases on query, key and value."""

from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2Model

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(Qwen2Config, Qwen2DecoderLayer, Qwen2Model, Qwen2ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormQwen2Config, GeonormQwen2DecoderLayer, GeonormQwen2Model, GeonormQwen2ForCausalLM = REWIRED

ADAPTER = Adapter(STOCK, REWIRED, note="biases on query, key, value")
