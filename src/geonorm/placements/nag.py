"""NAG: a centred update of unit size across the stream, times the stream's own size (arXiv 2606.16112)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.errors import check_count, check_positive
from geonorm.placements.base import Connection, EntryPlacement, Norms, Site, Sublayer, unit_rms
from geonorm.placements.connection import Normal, as_given


@dataclasses.dataclass(frozen=True)
class NAG(EntryPlacement):
    """``x <- x + rho alpha m u`` with ``rho = RMS(x)`` and u the centred output across x at RMS 1.

    ``m = (sum_i p_i sigmoid(<w_i, r> + b_i))^beta`` is a gate that reads ``r = x / rho``; p is a softmax of learnable
    numbers from 0, w is drawn with std 0.02, b starts at 0. alpha, one learnable number a sub-layer, starts at
    1/sqrt(k) in sub-layer k. The angle is ``atan(alpha m)`` whatever the size of the output.

    Options:
        gates: number of sigmoids in the gate.
        beta: exponent of the gate.
        normalize_entry: bring the embeddings to RMS 1 first. Off by default: the rule has no size of its own.
    """

    name = "nag"

    gates: int = 4
    beta: float = 1.0
    normalize_entry: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("gates", self.gates)
        check_positive("beta", self.beta)

    def connection(self, site: Site) -> Connection:
        """Make the gated step for one sub-layer."""
        return NAGConnection(site.width, self.gates, self.beta, 1 / math.sqrt(site.number))


class NAGConnection(Connection):
    """Addition of the normalised tangent part; ``alpha`` of shape ``[1]``, the gate's ``weight`` of ``[gates, d]``."""

    def __init__(self, dim: int, gates: int, beta: float, alpha: float) -> None:
        super().__init__()
        self.beta, self.start = beta, alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.mixture = nn.Parameter(torch.empty(gates))
        self.weight = nn.Parameter(torch.empty(gates, dim))
        self.bias = nn.Parameter(torch.empty(gates))
        self.reset_parameters()

    def initial_value(self, name: str) -> float | Normal:
        """alpha at 1/sqrt(k), the gate's weight drawn, all else 0."""
        return {"alpha": self.start, "weight": Normal(0.02)}.get(name, 0.0)

    def forward(self, stream: Tensor, sublayer: Sublayer, norms: Norms) -> Tensor:
        """Return ``x + rho alpha m u``; a row whose centred output lies along x stays."""
        # The sub-layer reads directions alone, as the addend is one.
        update = sublayer(unit_rms(stream))
        dtype = torch.promote_types(torch.promote_types(stream.dtype, update.dtype), torch.float32)
        x, f = stream.to(dtype), update.to(dtype)
        r, rho = unit_rows(x)
        u, _ = unit_rows(geometry.tangent(x, f - f.mean(-1, keepdim=True)))
        with as_given(x):
            gate = torch.sigmoid(nn.functional.linear(r, self.weight.to(dtype), self.bias.to(dtype)))
            m = (gate @ torch.softmax(self.mixture.to(dtype), 0)).unsqueeze(-1) ** self.beta
        return (x + self.branch(rho * self.alpha.to(dtype) * m * u)).to(stream.dtype)


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows at RMS 1 and their RMS; a zero row stays zero."""
    rms = geometry.norm(x) / math.sqrt(x.shape[-1])
    return x / torch.where(rms > 0, rms, 1.0), rms
