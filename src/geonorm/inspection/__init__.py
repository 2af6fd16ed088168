"""What a trained model does along its depth, and the same model as a walk on the sphere."""

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.inspection.geodesic import geodesic_form
    from geonorm.inspection.laws import LAWS, LawFit, LawFits, fit_laws
    from geonorm.inspection.measure import Inspection, Quartiles, SublayerRow, inspect_model
    from geonorm.inspection.probe import Move, gradient_norms, recorded_angles, watched

# Imported when first named, so that the command line can show its help without loading the models.
_HOMES = {
    "LAWS": "laws",
    "Inspection": "measure",
    "LawFit": "laws",
    "LawFits": "laws",
    "Move": "probe",
    "Quartiles": "measure",
    "SublayerRow": "measure",
    "fit_laws": "laws",
    "geodesic_form": "geodesic",
    "gradient_norms": "probe",
    "inspect_model": "measure",
    "recorded_angles": "probe",
    "watched": "probe",
}

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

__getattr__ = names_from(__name__, _HOMES)
