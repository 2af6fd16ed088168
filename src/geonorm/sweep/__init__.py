"""Controlled comparisons: trials, an executor, statistics. ``compare.py`` runs one."""

from geonorm.experiments.config import CompareConfig

__all__ = ["CompareConfig"]
