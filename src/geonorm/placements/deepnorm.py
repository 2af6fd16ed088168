"""DeepNorm: ``N(alpha x + f(x))`` with weights drawn to match (arXiv 2203.00555, decoder-only rules)."""

from __future__ import annotations

import dataclasses

from geonorm.placements.base import Connection, EntryPlacement, InitRule, Role, Site
from geonorm.placements.post import ScaledPostConnection


@dataclasses.dataclass(frozen=True)
class DeepNorm(EntryPlacement):
    """``x <- N(alpha x + f(x))``, ``alpha = (2L)^(1/4)``, Xavier gain ``beta = (8L)^(-1/4)``.

    The gain goes to the value, attention output and all MLP weights; query and key have gain 1 (arXiv 2203.00555,
    table of the decoder-only rules and figure 2). For L = 12: alpha 2.2134, beta 0.3195.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first.
    """

    name = "deepnorm"
    norms = ("stream",)
    final_norm = False

    @staticmethod
    def alpha(num_layers: int) -> float:
        """Weight of the stream in a decoder of this depth."""
        return (2 * num_layers) ** 0.25

    @staticmethod
    def beta(num_layers: int) -> float:
        """Xavier gain in a decoder of this depth."""
        return (8 * num_layers) ** -0.25

    def connection(self, site: Site) -> Connection:
        """Make the weighted addition and norm for one sub-layer."""
        return ScaledPostConnection(self.alpha(site.num_layers))

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Xavier with gain beta where the paper puts it, gain 1 on query and key, the base elsewhere."""
        if role in ("value", "attention_output", "mlp_input", "mlp_output"):
            return InitRule("xavier", self.beta(num_layers))
        if role in ("query", "key"):
            return InitRule("xavier", 1.0)
        return InitRule()
