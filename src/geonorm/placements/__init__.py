"""Placements: where a Transformer normalises. One file each; the table is in ``registry.py``."""

from geonorm.placements.base import Connection, InitRule, Placement, Site, base_std, unit_rms
from geonorm.placements.registry import REGISTRY, available, create, parse
from geonorm.placements.wiring import WiredConnection, Wiring

__all__ = [
    "REGISTRY",
    "Connection",
    "InitRule",
    "Placement",
    "Site",
    "WiredConnection",
    "Wiring",
    "available",
    "base_std",
    "create",
    "parse",
    "unit_rms",
]
