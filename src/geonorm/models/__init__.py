"""Hugging Face decoders with any placement. Importing this registers the classes with transformers."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ModuleNotFoundError("geonorm.models needs transformers; run pip install 'geonorm[hf]'", name="transformers")

from geonorm.models.adapter import Adapter, register, supported_families
from geonorm.models.build import ModelShape, build_model
from geonorm.models.families import llama
from geonorm.models.init import InitRow, init_report, init_weights
from geonorm.models.rewiring import base_model, blocks, rewire

for _family in (llama,):
    register(_family.ADAPTER)

__all__ = [
    "Adapter",
    "InitRow",
    "ModelShape",
    "base_model",
    "blocks",
    "build_model",
    "init_report",
    "init_weights",
    "rewire",
    "supported_families",
]
