"""Qwen 3: Llama's layout with norms on query and key."""

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(Qwen3Config, Qwen3DecoderLayer, Qwen3Model, Qwen3ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormQwen3Config, GeonormQwen3DecoderLayer, GeonormQwen3Model, GeonormQwen3ForCausalLM = REWIRED

ADAPTER = Adapter(STOCK, REWIRED, note="norms on query and key")
