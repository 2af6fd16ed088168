"""The step on the sphere behind one function, with interchangeable implementations."""

from geonorm.ops.dispatch import IMPLEMENTATIONS, sphere_step, which

__all__ = ["IMPLEMENTATIONS", "sphere_step", "which"]
