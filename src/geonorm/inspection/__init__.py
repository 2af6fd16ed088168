"""What a trained model does along its depth, and the same model as a walk on the sphere."""

from geonorm.inspection.geodesic import geodesic_form
from geonorm.inspection.laws import LAWS, LawFit, LawFits, fit_laws
from geonorm.inspection.measure import Inspection, Quartiles, SublayerRow, inspect_model
from geonorm.inspection.probe import Move, gradient_norms, recorded_angles, watched

__all__ = [
    "LAWS",
    "Inspection",
    "LawFit",
    "LawFits",
    "Move",
    "Quartiles",
    "SublayerRow",
    "fit_laws",
    "geodesic_form",
    "gradient_norms",
    "inspect_model",
    "recorded_angles",
    "watched",
]
