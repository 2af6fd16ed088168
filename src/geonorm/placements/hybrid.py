"""HybridNorm: norms on query, key and value, Post-Norm around the MLP (arXiv 2503.04598)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from geonorm.placements.base import (
    Connection,
    EntryPlacement,
    InitRule,
    Learned,
    Norms,
    Role,
    Site,
    Sublayer,
    check_flag,
)
from geonorm.placements.norm_kinds import NORM_KINDS
from geonorm.placements.pre import PreConnection, PreNorm


@dataclasses.dataclass(frozen=True)
class HybridNorm(EntryPlacement):
    """``z <- N(x + attention(x))``, ``x <- z + MLP(z)``: attention reads the stream as it is.

    Query, key and value of each head are normalised before any rotation, with one gain a channel of a head; by RMSNorm
    unless ``norm`` says otherwise. What writes to the stream is drawn scaled by 1/sqrt(2L), as in the authors'
    configurations.

    Options:
        first_pre: the first layer has norms on what its sub-layers read, as Pre-Norm has (the authors' starred
            variant).
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "hybrid"
    norms = ("input", "stream")

    first_pre: bool = False
    normalize_entry: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "first_pre")

    def slots(self, site: Site) -> tuple[str, ...]:
        """None at attention, one on the stream before the MLP; those of Pre-Norm in a first layer that is one."""
        if self.first_pre and site.layer == 1:
            return ("input",)
        return () if site.sublayer == "attention" else ("stream",)

    def connection(self, site: Site) -> Connection:
        """Make the addition for one sub-layer."""
        return PreConnection() if self.first_pre and site.layer == 1 else HybridConnection()

    def inside(self, place: str, size: int, dim: int, head_dim: int) -> Learned | None:
        """A norm over each head of query, key and value."""
        return HeadNorm(head_dim, self.norm or "rmsnorm") if place in ("query", "key", "value") else None

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the stream by 1/sqrt(2L)."""
        return PreNorm().init_rule(role, num_layers)


class HybridConnection(Connection):
    """Addition to the stream, after its norm where there is one."""

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``z + f(z)`` with ``z = N(x)`` around the MLP, ``z = x`` around attention."""
        z = norms["stream"](stream) if "stream" in norms else stream
        return z + self.branch(sublayer(z))


class HeadNorm(Learned):
    """A norm over each head: ``[..., heads * head_dim]`` in and out."""

    def __init__(self, head_dim: int, kind: str) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = NORM_KINDS[kind](head_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Normalise each head by itself."""
        return self.norm(features.unflatten(-1, (-1, self.head_dim))).flatten(-2).to(features.dtype)
