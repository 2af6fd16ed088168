"""The step on the sphere behind one function, with interchangeable implementations, and what it is compared with."""

from geonorm.ops.cpp import build_cpu
from geonorm.ops.dispatch import IMPLEMENTATIONS, sphere_step, which, why_not
from geonorm.ops.norms import add_rms_norm, scaled_add_rms_norm

__all__ = [
    "IMPLEMENTATIONS",
    "add_rms_norm",
    "build_cpu",
    "scaled_add_rms_norm",
    "sphere_step",
    "which",
    "why_not",
]
