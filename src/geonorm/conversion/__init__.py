"""A trained Pre-Norm model turned into a GeoNorm model that starts from its weights and its angles.

Names are imported when first asked for, so that the options of the command can be read without the libraries of models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geonorm.conversion.calibrate import METHODS, Calibration
    from geonorm.conversion.convert import Conversion, convert_model

__all__ = ["METHODS", "Calibration", "Conversion", "convert_model"]

_HOME = {"METHODS": "calibrate", "Calibration": "calibrate", "Conversion": "convert", "convert_model": "convert"}


def __getattr__(name: str) -> Any:
    """Import what is asked for from its module."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
