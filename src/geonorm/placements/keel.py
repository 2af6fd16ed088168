"""Keel: ``N2(a x + f(N1(x)))``, a the number of sub-layers (arXiv 2601.19895)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class Keel(EntryPlacement):
    """``x <- N2(a x + f(N1(x)))`` with a = 2L, the number of sub-layers.

    The first attention has no outer norm, and a is 1 in the first attention and the first MLP. The last outer norm
    takes the place of the final one. The init is the same for every weight: the paper asks for none of its own.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "keel"
    norms = ("input", "stream")
    final_norm = False

    normalize_entry: bool = False

    def slots(self, site: Site) -> tuple[str, ...]:
        """All but the outer norm of the first attention."""
        return ("input",) if site.number == 1 else self.norms

    def connection(self, site: Site) -> Connection:
        """Make the weighted addition and norms for one sub-layer."""
        return KeelConnection(1.0 if site.layer == 1 else 2.0 * site.num_layers)


class KeelConnection(Connection):
    """Norm, where there is one, of ``scale x + f(N(x))``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``N2(a x + f(N1(x)))``."""
        y = self.scale * stream + self.branch(sublayer(norms["input"](stream)))
        return norms["stream"](y) if "stream" in norms else y

    def extra_repr(self) -> str:
        """Weight of the stream."""
        return f"scale={self.scale:.4g}"
