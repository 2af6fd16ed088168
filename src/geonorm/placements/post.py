"""Post-Norm: ``N(x + f(x))`` (arXiv 1706.03762)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class PostNorm(EntryPlacement):
    """``x <- N(x + f(x))``; the last of these norms takes the place of the final norm.

    The placement is the paper's, the entry at RMS 1 is ours.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first, so that the first layer reads what every other reads.
    """

    name = "post"
    norms = ("stream",)
    final_norm = False

    def connection(self, site: Site) -> Connection:
        """Make the addition and norm for one sub-layer."""
        return ScaledPostConnection(1.0)


class ScaledPostConnection(Connection):
    """Norm of ``alpha x + f(x)``; alpha is 1 in Post-Norm."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``N(alpha x + f(x))``."""
        update = self.branch(sublayer(stream))
        return norms["stream"](stream + update if self.alpha == 1.0 else self.alpha * stream + update)

    def extra_repr(self) -> str:
        """Weight of the stream."""
        return f"alpha={self.alpha:.4f}"
