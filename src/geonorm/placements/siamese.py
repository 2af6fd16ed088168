"""SiameseNorm: a Post-Norm and a Pre-Norm stream that share their sub-layers (arXiv 2602.08064)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from geonorm.placements.base import Connection, EntryPlacement, Exit, InitRule, Norms, Role, Site, Sublayer
from geonorm.placements.pre import PreNorm


@dataclasses.dataclass(frozen=True)
class SiameseNorm(EntryPlacement):
    """``x <- N1(x)``, ``z = f(N2(x + N3(y)))``, ``x <- x + z / sqrt(2l)``, ``y <- y + z`` in layer l, counted from 1.

    The stream is ``[..., 2, d]``: x and y, both the embeddings at first. The head reads ``N(N(x) + N(y))``. The point
    that the stream stands for is y. What writes to the stream is drawn scaled by 1/sqrt(2L), as for Pre-Norm, whose
    recipes the authors keep.

    Options:
        normalize_entry: bring the embeddings to RMS 1 first. Off by default, as published.
    """

    name = "siamese"
    norms = ("stream", "input", "second")
    exit_norms = ("first", "second")
    single_stream = False

    normalize_entry: bool = False

    def enter(self, h: Tensor) -> Tensor:
        """Make both rows from the embeddings."""
        x = super().enter(h)
        return torch.stack((x, x), -2)

    def connection(self, site: Site) -> Connection:
        """Make the two additions for one sub-layer."""
        return SiameseConnection(1 / math.sqrt(2 * site.layer))

    def exit_module(self, dim: int) -> Exit:
        """The sum of both rows, each normalised."""
        return SiameseExit()

    def point(self, stream: Tensor) -> Tensor:
        """The row that is not normalised."""
        return stream[..., 1, :]

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the stream by 1/sqrt(2L)."""
        return PreNorm().init_rule(role, num_layers)


class SiameseConnection(Connection):
    """Norm of the first row, then addition to both; the sub-layer reads both."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return the two rows after the sub-layer."""
        x, y = stream.unbind(-2)
        x = norms["stream"](x)
        update = self.branch(sublayer(norms["input"](x + norms["second"](y))))
        return torch.stack((x + self.scale * update, y + update), -2)

    def extra_repr(self) -> str:
        """Weight of the addition to the first row."""
        return f"scale={self.scale:.4f}"


class SiameseExit(Exit):
    """``N(x) + N(y)``; the final norm follows."""

    def forward(self, stream: Tensor, norms: Norms) -> Tensor:
        """Return ``[..., d]``."""
        x, y = stream.unbind(-2)
        return norms["first"](x) + norms["second"](y)
