"""A trained Pre-Norm model turned into a GeoNorm model that starts from its weights and its angles."""

from geonorm.conversion.calibrate import METHODS, Calibration
from geonorm.conversion.convert import Conversion, convert_model

__all__ = ["METHODS", "Calibration", "Conversion", "convert_model"]
