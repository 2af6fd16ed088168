"""A sandwich whose addition keeps the size: ``sqrt((k-1)/k) x + N2(f(N1(x))) / sqrt(k)`` (Beam of transformers)."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class ScaledSandwich(EntryPlacement):
    """``x <- sqrt((k-1)/k) x + N2(f(N1(x))) / sqrt(k)``, k = 2l for attention and 2l + 1 for the MLP of layer l.

    With orthogonal updates of RMS 1 the stream stays at RMS 1 and turns by ``atan(1/sqrt(k-1))``. The weights cancel in
    the norms that read the stream: with the same parameters this is SandwichNorm up to rounding. The init, the same for
    every weight, and the entry are ours.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. On by default: the rule keeps a size that is 1.
    """

    name = "scaled_sandwich"
    norms = ("input", "output")

    def connection(self, site: Site) -> Connection:
        """Make the weighted addition for one sub-layer."""
        return ScaledSandwichConnection(site.number + 1)


class ScaledSandwichConnection(Connection):
    """Weighted addition of the normalised output; the squares of the two weights add up to 1."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``sqrt((k-1)/k) x + N2(f(N1(x))) / sqrt(k)``."""
        update = self.branch(norms["output"](sublayer(norms["input"](stream))))
        return math.sqrt((self.k - 1) / self.k) * stream + update * (1 / math.sqrt(self.k))

    def extra_repr(self) -> str:
        """Number of the addition."""
        return f"k={self.k}"
