"""Parallel sub-layers: ``x + attention(N1(x)) + mlp(N2(x))`` (GPT-J, GPT-NeoX: arXiv 2204.06745; PaLM: 2204.02311)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, InitRule, Norms, Role, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class Parallel(EntryPlacement):
    """``x <- x + attention(N1(x)) + mlp(N2(x))``: both sub-layers of a layer read the same x.

    The stock wiring of GPT-NeoX and Pythia, bit for bit. PaLM shares one norm between the two. Between attention and
    MLP the stream is the pair ``(x, attention output)``; the point that it stands for is their sum.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "parallel"
    norms = ("input",)

    normalize_entry: bool = False

    def connection(self, site: Site) -> Connection:
        """Make the half of the addition that belongs to one sub-layer."""
        return ParallelAttention() if site.sublayer == "attention" else ParallelMLP()

    def point(self, stream: Any) -> Tensor:
        """Return x, with the pending attention output added."""
        return stream[0] + stream[1] if isinstance(stream, tuple) else stream

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the stream by sqrt(10)/L.

        GPT-NeoX draws it with std ``2 / (L sqrt(d))`` and everything else with ``sqrt(2 / (5 d))`` (arXiv 2204.06745,
        section 2.1.3); the ratio of the two is kept over the base.
        """
        if role in ("attention_output", "mlp_output"):
            return InitRule(gain=math.sqrt(10) / num_layers)
        return InitRule()


class ParallelAttention(Connection):
    """First half of a layer: keeps the attention output beside the stream until the MLP has read the stream too."""

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> tuple[Tensor, Tensor]:
        """Return ``(x, f(N(x)))``."""
        return stream, self.branch(sublayer(norms["input"](stream)))


class ParallelMLP(Connection):
    """Second half of a layer: adds both outputs."""

    def forward(self, stream: tuple[Tensor, Tensor], sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + a + f(N(x))`` from the pair ``(x, a)``."""
        x, pending = stream
        # In GPT-NeoX's order, so that not a bit differs.
        return self.branch(sublayer(norms["input"](x))) + pending + x
