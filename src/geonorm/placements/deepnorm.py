"""DeepNorm: ``N(alpha x + f(x))`` with weights drawn to match (arXiv 2203.00555, decoder-only rules)."""

from __future__ import annotations

import dataclasses

from geonorm.placements.base import Connection, EntryPlacement, InitRule, Role, Site, check_flag
from geonorm.placements.post import ScaledPostConnection


@dataclasses.dataclass(frozen=True)
class DeepNorm(EntryPlacement):
    """``x <- N(alpha x + f(x))``, ``alpha = (2L)^(1/4)``, Xavier gain ``beta = (8L)^(-1/4)``.

    The gain goes to the value, attention output and MLP weights; query and key have gain 1 (arXiv 2203.00555, table of
    the decoder-only rules and figure 2). For L = 12: alpha 2.2134, beta 0.3195. The paper's MLP is not gated, so what
    it says of a gated one is a reading: ours scales all three matrices, torchscale, the authors' library, leaves the
    linear branch alone (its GLU's ``gate``, Llama's ``up_proj``). The entry at RMS 1 is ours too.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first.
        beta_on_up: whether beta also scales the linear branch of a gated MLP; false for gain 1 there, as in torchscale.
    """

    beta_on_up: bool = True

    name = "deepnorm"
    norms = ("stream",)
    final_norm = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "beta_on_up")

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
        if role in ("value", "attention_output", "mlp_input", "mlp_output") or (role == "mlp_up" and self.beta_on_up):
            return InitRule("xavier", self.beta(num_layers))
        if role in ("query", "key", "mlp_up"):
            return InitRule("xavier", 1.0)
        return InitRule()
