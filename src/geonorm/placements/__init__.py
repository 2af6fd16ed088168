"""Placements: where a Transformer normalises. One file each; the table is in ``registry.py``."""

from geonorm.placements.base import Connection, InitRule, Placement, Site, base_std, unit_rms
from geonorm.placements.connection import Exit, Learned, Normal, set_training_step
from geonorm.placements.registry import REGISTRY, available, create, parse
from geonorm.placements.wiring import WiredConnection, Wiring

__all__ = [
    "REGISTRY",
    "Connection",
    "Exit",
    "InitRule",
    "Learned",
    "Normal",
    "Placement",
    "Site",
    "WiredConnection",
    "Wiring",
    "available",
    "base_std",
    "create",
    "parse",
    "set_training_step",
    "unit_rms",
]
