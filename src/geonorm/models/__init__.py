"""Hugging Face decoders with any placement. Importing this registers the classes with transformers."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ModuleNotFoundError("geonorm.models needs transformers; run pip install 'geonorm[hf]'", name="transformers")

from geonorm.models import families as _families  # noqa: F401
from geonorm.models.adapter import Adapter, supported_families
from geonorm.models.constraint import normalize_weights
from geonorm.models.init import InitRow, init_report, init_weights
from geonorm.models.loading import load_model
from geonorm.models.rewiring import base_model, blocks, current_placement, rewire, stock_placement
from geonorm.models.shape import ModelShape, build_model
from geonorm.models.stock import LoadReport, load_stock

__all__ = [
    "Adapter",
    "InitRow",
    "LoadReport",
    "ModelShape",
    "base_model",
    "blocks",
    "build_model",
    "current_placement",
    "init_report",
    "init_weights",
    "load_model",
    "load_stock",
    "normalize_weights",
    "rewire",
    "stock_placement",
    "supported_families",
]
