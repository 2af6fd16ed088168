"""mHC: hyper-connections whose streams mix by a doubly stochastic matrix (arXiv 2512.24880)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from geonorm.errors import check_count
from geonorm.placements.base import Connection, Site
from geonorm.placements.connection import as_given
from geonorm.placements.hyper import GATE_FLOOR, Gate, Hyper, HyperConnection

# Logit by which a stream prefers itself at first: exp(-8) is left for the others.
_OWN = 8.0


@dataclasses.dataclass(frozen=True)
class ManifoldHyper(Hyper):
    """As ``hyper``, with ``x_i <- sum_j C_ji x_j + post_i f``; C is doubly stochastic.

    C comes from a third gate: softmax of its logits over j's row, then rows and columns are divided by their sums in
    turn (Sinkhorn-Knopp). The logits of a stream with itself have 8 added, so that C is near the identity at first and
    the whole near Pre-Norm; transformers' DeepSeek-V4, whose formula this is, adds nothing.

    Options:
        streams: n.
        iterations: number of times that columns are normalised.
    """

    name = "mhc"

    iterations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("iterations", self.iterations)

    def connection(self, site: Site) -> Connection:
        """Make the reading, mixing and writing for one sub-layer."""
        return MixedHyperConnection(site.width, self.streams, self.iterations)


class MixedHyperConnection(HyperConnection):
    """A hyper-connection that mixes the streams before it adds to them."""

    post_floor = 0.0

    def __init__(self, dim: int, streams: int, iterations: int) -> None:
        super().__init__(dim, streams)
        self.streams, self.iterations = streams, iterations
        self.comb = Gate(dim, streams, streams * streams, 0.0)

    def mixed(self, row: Tensor, stream: Tensor) -> Tensor:
        """Return ``sum_j C_ji x_j``."""
        logits = self.comb(row).unflatten(-1, (self.streams, self.streams))
        own = _OWN * torch.eye(self.streams, dtype=logits.dtype, device=logits.device)
        matrix = doubly_stochastic(logits + own, self.iterations)
        with as_given(stream):
            return matrix.mT.to(stream.dtype) @ stream


def doubly_stochastic(logits: Tensor, iterations: int) -> Tensor:
    """Sinkhorn-Knopp from a softmax over rows, ``[..., n, n]``; the columns are normalised last."""
    matrix = torch.softmax(logits, -1) + GATE_FLOOR
    matrix = matrix / (matrix.sum(-2, keepdim=True) + GATE_FLOOR)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + GATE_FLOOR)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + GATE_FLOOR)
    return matrix
