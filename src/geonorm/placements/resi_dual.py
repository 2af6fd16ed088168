"""ResiDual: a Post-Norm stream and a plain sum of the same outputs beside it (arXiv 2304.14802)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from geonorm.errors import check_positive
from geonorm.placements.base import Connection, EntryPlacement, Exit, Norms, Site, Sublayer


@dataclasses.dataclass(frozen=True)
class ResiDual(EntryPlacement):
    """``u = f(x)``, ``x <- N(x + u)``, ``d <- d + c u`` from ``d = c x``; the head reads ``alpha x + N(d)``.

    The stream is ``[..., 2, d]``: x, which the sub-layers read, and d. The point that it stands for is x. c and alpha
    are those of the authors' code; the init, the same for every weight, and the entry are ours.

    Options:
        dual_scale: c; the authors use 1 and 0.05.
        exit_scale: alpha.
        normalize_entry: bring the embeddings to RMS 1 first.
    """

    name = "resi_dual"
    norms = ("stream",)
    exit_norms = ("dual",)
    final_norm = False
    single_stream = False

    dual_scale: float = 1.0
    exit_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("dual_scale", self.dual_scale)
        check_positive("exit_scale", self.exit_scale)

    def enter(self, h: Tensor) -> Tensor:
        """Make both rows from the embeddings."""
        x = super().enter(h)
        return torch.stack((x, self.dual_scale * x), -2)

    def connection(self, site: Site) -> Connection:
        """Make the two additions for one sub-layer."""
        return ResiDualConnection(self.dual_scale)

    def exit_module(self, dim: int) -> Exit:
        """The sum of both rows, the second normalised."""
        return ResiDualExit(self.exit_scale)

    def point(self, stream: Tensor) -> Tensor:
        """The row that sub-layers read."""
        return stream[..., 0, :]


class ResiDualConnection(Connection):
    """Post-Norm on the first row; plain addition, times ``scale``, to the second."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``(N(x + f(x)), d + c f(x))``."""
        x, dual = stream.unbind(-2)
        update = self.branch(sublayer(x))
        return torch.stack((norms["stream"](x + update), dual + self.scale * update), -2)


class ResiDualExit(Exit):
    """``alpha x + N(d)``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, norms: Norms) -> Tensor:
        """Return ``[..., d]``."""
        x, dual = stream.unbind(-2)
        return self.scale * x + norms["dual"](dual)
