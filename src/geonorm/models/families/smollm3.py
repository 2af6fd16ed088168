"""SmolLM 3: Llama's layout with layers that have no rotary embedding."""

from transformers.models.smollm3.configuration_smollm3 import SmolLM3Config
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer, SmolLM3ForCausalLM, SmolLM3Model

from geonorm.models.adapter import Adapter
from geonorm.models.classes import Classes, rewired_classes

STOCK = Classes(SmolLM3Config, SmolLM3DecoderLayer, SmolLM3Model, SmolLM3ForCausalLM)
REWIRED = rewired_classes(__name__, STOCK)
GeonormSmolLM3Config, GeonormSmolLM3DecoderLayer, GeonormSmolLM3Model, GeonormSmolLM3ForCausalLM = REWIRED

ADAPTER = Adapter(STOCK, REWIRED, note="layers without rotary embedding")
