"""Hyper-connections without mixing: n streams, read and written with learnt weights (arXiv 2409.19606)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from geonorm.errors import UserError, check_count
from geonorm.placements.base import Connection, Exit, InitRule, Norms, Placement, Role, Site, Sublayer
from geonorm.placements.connection import Learned, Normal, as_given
from geonorm.placements.pre import PreNorm

GATE_STD = 0.02
# So small that the weights hardly depend on the token at first.
GATE_SCALE = 0.01
# What keeps a weight from vanishing, as in the models of transformers.
GATE_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class Hyper(Placement):
    """n streams; the sub-layer reads ``N(sum_i pre_i x_i)``, and ``x_i <- x_i + post_i f``: no stream feeds another.

    With r the n streams of a token in one row at RMS 1, ``pre = sigmoid(a <w, r> + b)`` and ``post = 2 sigmoid(a' <w',
    r> + b')``, plus 1e-6 on both; every stream starts as the embedding, the head reads their sum with weights like pre.
    As in transformers' HYV4, a starts at 0.01, b so that pre is 1/n and post 1: at first this is Pre-Norm.

    Options:
        streams: n.
    """

    name = "hyper"
    norms = ("input",)
    single_stream = False

    streams: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count("streams", self.streams) < 2:
            raise UserError(f"`streams` must be at least 2, got {self.streams}; with one stream use placement 'pre'")

    def enter(self, h: Tensor) -> Tensor:
        """Copy the embeddings to every stream: ``[..., n, d]``."""
        return h.unsqueeze(-2).expand(*h.shape[:-1], self.streams, h.shape[-1])

    def connection(self, site: Site) -> Connection:
        """Make the reading and writing for one sub-layer."""
        return HyperConnection(site.width, self.streams)

    def exit_module(self, dim: int) -> Exit:
        """The weighted sum of the streams."""
        return HyperExit(dim, self.streams)

    def point(self, stream: Tensor) -> Tensor:
        """The mean of the streams."""
        return stream.mean(-2)

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """Scale what writes to the streams by 1/sqrt(2L), as Pre-Norm, which this is at first."""
        return PreNorm().init_rule(role, num_layers)


class Gate(Learned):
    """Logits ``a <w, r> + b`` from the streams of a token, ``[..., n, d] -> [..., outputs]``."""

    def __init__(self, dim: int, streams: int, outputs: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(outputs, streams * dim))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def initial_value(self, name: str) -> float | Normal:
        """w drawn with std 0.02, a at 0.01, b at its start."""
        return {"weight": Normal(GATE_STD), "scale": GATE_SCALE, "bias": self.start}[name]

    def forward(self, row: Tensor) -> Tensor:
        """Return the logits for a row ``[..., n d]`` that :func:`flattened` made."""
        with as_given(row):
            return self.scale * functional.linear(row, self.weight.to(row.dtype)) + self.bias


def flattened(stream: Tensor) -> Tensor:
    """All streams of a token as one row at RMS 1, ``[..., n, d] -> [..., n d]``, in float32 at least."""
    row = stream.to(torch.promote_types(stream.dtype, torch.float32)).flatten(-2)
    return functional.rms_norm(row, row.shape[-1:], eps=1e-6)


class HyperConnection(Connection):
    """Reads a weighted sum of the streams, adds a weighted output to each."""

    # DeepSeek-V4 has none on what is written.
    post_floor = GATE_FLOOR

    def __init__(self, dim: int, streams: int) -> None:
        super().__init__()
        self.pre = Gate(dim, streams, streams, -math.log(streams - 1))
        self.post = Gate(dim, streams, streams, 0.0)

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return the streams after the sub-layer."""
        row = flattened(stream)
        x = weighted_sum(torch.sigmoid(self.pre(row)) + GATE_FLOOR, stream)
        post = (2 * torch.sigmoid(self.post(row)) + self.post_floor).to(stream.dtype)
        update = self.branch(sublayer(norms["input"](x)))
        return self.mixed(row, stream) + post.unsqueeze(-1) * update.unsqueeze(-2)

    def mixed(self, row: Tensor, stream: Tensor) -> Tensor:
        """The streams that the output is added to: as they are."""
        return stream


class HyperExit(Exit):
    """A weighted sum of the streams; the final norm follows."""

    def __init__(self, dim: int, streams: int) -> None:
        super().__init__()
        self.pre = Gate(dim, streams, streams, -math.log(streams - 1))

    def forward(self, stream: Tensor, norms: Norms) -> Tensor:
        """Return ``[..., d]``."""
        return weighted_sum(torch.sigmoid(self.pre(flattened(stream))) + GATE_FLOOR, stream)


def weighted_sum(weights: Tensor, stream: Tensor) -> Tensor:
    """Return ``sum_i w_i x_i`` for weights ``[..., n]`` and streams ``[..., n, d]``, in the streams' dtype."""
    with as_given(stream):
        return (weights.to(stream.dtype).unsqueeze(-2) @ stream).squeeze(-2)
