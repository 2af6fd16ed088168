"""A trained Pre-Norm model turned into a GeoNorm model that starts from its weights and its angles.

Names are imported when first asked for, so that the options of the command can be read without the libraries of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.conversion.calibrate import METHODS, Calibration
    from geonorm.conversion.convert import Conversion, convert_model

__all__ = ["METHODS", "Calibration", "Conversion", "convert_model"]

_HOMES = {"METHODS": "calibrate", "Calibration": "calibrate", "Conversion": "convert", "convert_model": "convert"}

__getattr__ = names_from(__name__, _HOMES)
