"""LayerNorm Scaling: ``x + f(N(x) / sqrt(l))`` (arXiv 2502.05795)."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class LayerNormScaling(EntryPlacement):
    """``x <- x + f(N(x) / sqrt(l))`` in layer l, counted from 1.

    The init is the same for every weight: its authors warn against scaling it down with depth as well.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "lns"
    norms = ("input",)

    normalize_entry: bool = False

    def connection(self, site: Site) -> Connection:
        """Make the addition for one sub-layer."""
        return ScaledInputConnection(1 / math.sqrt(site.layer))


class ScaledInputConnection(Connection):
    """Addition of the sub-layer's output; the sub-layer reads the normalised stream times ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + f(scale N(x))``."""
        return stream + self.branch(sublayer(norms["input"](stream) * self.scale))

    def extra_repr(self) -> str:
        """Weight of what the sub-layer reads."""
        return f"scale={self.scale:.4f}"
