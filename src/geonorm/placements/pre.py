"""Pre-Norm: ``x + f(N(x))`` (arXiv 2002.04745), with GPT-2's scaling of the projections that write to the stream."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from geonorm.placements.base import (
    Connection,
    EntryPlacement,
    InitRule,
    Norms,
    Role,
    Site,
    Sublayer,
)


@dataclasses.dataclass(frozen=True)
class PreNorm(EntryPlacement):
    """``x <- x + f(N(x))``; the stock wiring of Llama and GPT-2, bit for bit.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "pre"
    norms = ("input",)

    normalize_entry: bool = False

    def connection(self, site: Site) -> Connection:
        """Make the addition for one sub-layer."""
        return PreConnection()

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the stream by 1/sqrt(2L)."""
        if role in ("attention_output", "mlp_output"):
            return InitRule(gain=1 / math.sqrt(2 * num_layers))
        return InitRule()


class PreConnection(Connection):
    """Addition of the sub-layer's output; the sub-layer reads the normalised stream."""

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + f(N(x))``."""
        return stream + self.branch(sublayer(norms["input"](stream)))
