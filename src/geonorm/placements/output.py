"""Norm on the output: ``x + N(f(x))`` (OLMo 2, arXiv 2501.00656; before it Swin v2, arXiv 2111.09883)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class OutputNorm(EntryPlacement):
    """``x <- x + N(f(x))``: the sub-layer reads the stream as it is and returns rows of unit size.

    The stock wiring of OLMo 2 with ``normalize_entry=False``, bit for bit. OLMo 2 also has norms on query and key,
    which belong to its attention.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. On by default, for the same reason as in SandwichNorm:
            updates of unit size drown an embedding drawn with a small standard deviation.
    """

    name = "output"
    norms = ("output",)

    def connection(self, site: Site) -> Connection:
        """Make the addition for one sub-layer."""
        return OutputConnection()


class OutputConnection(Connection):
    """Addition of the normalised output; the sub-layer reads the stream itself."""

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + N(f(x))``."""
        return stream + self.branch(norms["output"](sublayer(stream)))
