"""SandwichNorm: ``x + N2(f(N1(x)))`` (arXiv 2105.13290)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class SandwichNorm(EntryPlacement):
    """``x <- x + N2(f(N1(x)))``: the sub-layer reads and returns rows of unit size.

    The placement is the paper's. Its entry at RMS 1 and its init, the same for every weight, are ours.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. On by default: updates of unit size drown an embedding
            drawn with a small standard deviation. False for rows that enter as they are.
    """

    name = "sandwich"
    norms = ("input", "output")

    def connection(self, site: Site) -> Connection:
        """Make the addition for one sub-layer."""
        return SandwichConnection()


class SandwichConnection(Connection):
    """Addition of the normalised output; the sub-layer reads the normalised stream."""

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + N2(f(N1(x)))``."""
        return stream + self.branch(norms["output"](sublayer(norms["input"](stream))))
