"""Attention residuals: each sub-layer reads a softmax over what came before it (arXiv 2603.15031)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from geonorm.errors import check_count
from geonorm.placements.base import Connection, Exit, InitRule, Norms, Placement, Role, Site, Sublayer
from geonorm.placements.connection import Learned, as_given
from geonorm.placements.hyper import weighted_sum
from geonorm.placements.pre import PreNorm


@dataclasses.dataclass(frozen=True)
class AttentionResiduals(Placement):
    """The sub-layer reads ``N(sum_i softmax_i(<w, n(V_i)>) V_i)``: V: embedding, finished blocks' sums, the open one.

    w, one row a connection, starts at 0: all sources weigh the same, and what is read is that of Pre-Norm but for the
    norm's epsilon. n is RMSNorm without a gain. The head reads such a sum over all sources with a w of its own. The
    stream is ``[..., sources, d]`` and grows; the point that it stands for is the sum.

    Options:
        block_size: number of sub-layers whose outputs are summed to one source; 1 for each by itself (the paper's Full
            AttnRes).
    """

    name = "attnres"
    norms = ("input",)
    single_stream = False

    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size)

    def enter(self, h: Tensor) -> Tensor:
        """The embeddings are the first source."""
        return h.unsqueeze(-2)

    def connection(self, site: Site) -> Connection:
        """Make the reading and the adding for one sub-layer."""
        return AttentionConnection(site.width, opens=(site.number - 1) % self.block_size == 0)

    def exit_module(self, dim: int) -> Exit:
        """The weighted sum of all sources."""
        return AttentionExit(dim)

    def point(self, stream: Tensor) -> Tensor:
        """The sum of the sources: what Pre-Norm's stream would be."""
        return stream.sum(-2)

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the stream by 1/sqrt(2L), as Pre-Norm, which this is at first."""
        return PreNorm().init_rule(role, num_layers)


class Query(Learned):
    """A row w that weighs sources: ``[..., sources, d] -> [..., d]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def initial_value(self, name: str) -> float:
        """All sources weigh the same."""
        return 0.0

    def forward(self, sources: Tensor) -> Tensor:
        """Return the sum, weighted by a softmax of ``<w, n(V_i)>``."""
        wide = sources.to(torch.promote_types(sources.dtype, torch.float32))
        keys = functional.rms_norm(wide, wide.shape[-1:], eps=1e-6)
        with as_given(sources):
            weights = torch.softmax(keys @ self.weight.to(wide.dtype), -1)
        return weighted_sum(weights, sources)


class AttentionConnection(Connection):
    """Reads all sources; its output is a new one, or is added to the last."""

    def __init__(self, dim: int, opens: bool) -> None:
        super().__init__()
        self.opens = opens
        self.query = Query(dim)

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return the sources after the sub-layer."""
        update = self.branch(sublayer(norms["input"](self.query(stream)))).unsqueeze(-2)
        if self.opens:
            return torch.cat((stream, update), -2)
        return torch.cat((stream[..., :-1, :], stream[..., -1:, :] + update), -2)


class AttentionExit(Exit):
    """The weighted sum of all sources; the final norm follows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = Query(dim)

    def forward(self, stream: Tensor, norms: Norms) -> Tensor:
        """Return ``[..., d]``."""
        return self.query(stream)
