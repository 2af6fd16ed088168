"""The step on the sphere behind one function, with interchangeable implementations."""

from geonorm.ops.cpp import build_cpu, ensure_cpu_kernels
from geonorm.ops.dispatch import IMPLEMENTATIONS, sphere_step, which, why_not

__all__ = ["IMPLEMENTATIONS", "build_cpu", "ensure_cpu_kernels", "sphere_step", "which", "why_not"]
