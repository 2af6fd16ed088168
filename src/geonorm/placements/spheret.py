"""SpheretNorm: the step on the sphere by a cheaper retraction, with learnable step sizes (arXiv 2608.02668)."""

from __future__ import annotations

import dataclasses

from geonorm.placements.geonorm import GeoNorm


@dataclasses.dataclass(frozen=True)
class SpheretNorm(GeoNorm):
    """GeoNorm with the angle ``phi(t) = p atan(t/p)`` and a trainable alpha a connection.

    p is 1, the projection, which its paper finds best on medium and large models; ``retraction=2.0`` is Cayley.

    Options: those of GeoNorm, with ``retraction="projection"`` and ``learnable=True`` by default.
    """

    name = "spheret"

    retraction: str | float = "projection"
    learnable: bool = True
