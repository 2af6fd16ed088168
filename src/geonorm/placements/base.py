"""What a placement is: the contract that every file in this folder fulfils.

A placement decides what happens to the residual stream around each sub-layer. It is a frozen set of options; the
modules it makes are its connections, one a sub-layer. The stream is opaque: whatever ``enter`` returns is handed from
connection to connection and given to ``exit``, so that schemes with two streams fit as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.errors import UserError, check_count, unknown

Sublayer = Callable[[Tensor], Tensor]
Norms = Mapping[str, Callable[[Tensor], Tensor]]
Role = Literal[
    "embedding",
    "query",
    "key",
    "value",
    "attention_output",
    "mlp_input",
    # The linear branch of a gated MLP, whose other input matrix, the one before the activation, is its mlp_input.
    "mlp_up",
    "mlp_output",
    "head",
    "norm",
    "bias",
    "step",
]
SUBLAYERS = ("attention", "mlp")
WEIGHT_ROLES = (
    "embedding", "query", "key", "value", "attention_output", "mlp_input", "mlp_up", "mlp_output", "head",
)  # fmt: skip


def base_std(dim: int, std: float = 0.02) -> float:
    """Standard deviation of a weight at width ``dim``: GPT-2's 0.02 at width 768, in proportion to 1/sqrt(width)."""
    return std * math.sqrt(768 / dim)


@dataclasses.dataclass(frozen=True)
class InitRule:
    """How one weight is drawn: a normal distribution with ``std = gain * base`` (see :meth:`std`)."""

    kind: Literal["normal", "xavier"] = "normal"
    gain: float = 1.0

    def std(self, shape: tuple[int, ...] | torch.Size, base: float) -> float:
        """Standard deviation for a weight of shape ``[out, in]``; ``base`` serves ``kind="normal"`` only.

        Raises:
            UserError: ``kind="xavier"`` and the shape has not two axes.
        """
        if self.kind == "normal":
            return self.gain * base
        if len(shape) != 2:
            raise UserError(f"a Xavier init needs a weight of shape [out, in], got {tuple(shape)}")
        num_out, num_in = shape
        return self.gain * math.sqrt(2.0 / (num_out + num_in))


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a connection sits: sub-layer ``sublayer`` of layer ``layer`` (counted from 1) of ``num_layers``."""

    layer: int
    sublayer: str
    num_layers: int

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers)
        if self.sublayer not in SUBLAYERS:
            raise unknown("sub-layer", self.sublayer, SUBLAYERS)
        if check_count("layer", self.layer) > self.num_layers:
            raise UserError(f"`layer` must lie in 1..{self.num_layers}, got {self.layer}")


class Connection(nn.Module):
    """One connection of the stream around one sub-layer.

    ``forward(stream, sublayer, norms)`` returns the next stream. ``norms`` maps each slot in the placement's
    ``norms`` to its module: the connection does not own them, so a model keeps the names its norms always had.
    """

    def forward(self, stream: Any, sublayer: Sublayer, norms: Norms) -> Any:
        """Return the stream after the sub-layer."""
        raise NotImplementedError("a connection defines forward")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Base of every placement: a frozen dataclass whose fields are its options.

    Class attributes:
        name: how users ask for it.
        norms: slots of the norms that each connection uses: ``"input"`` (on what the sub-layer reads), ``"output"`` (on
            what it returns), ``"stream"`` (on the stream after the addition).
        final_norm: whether the model's own norm before the head stays.
    """

    name: ClassVar[str] = ""
    norms: ClassVar[tuple[str, ...]] = ()
    final_norm: ClassVar[bool] = True

    def enter(self, h: Tensor) -> Any:
        """Make the stream from the token embeddings ``[..., d]``."""
        return h

    def connection(self, site: Site) -> Connection:
        """Make the connection for one sub-layer."""
        raise NotImplementedError("a placement defines connection")

    def exit(self, stream: Any) -> Tensor:
        """Return what the final norm, or the head where there is none, reads: ``[..., d]``."""
        return stream

    def point(self, stream: Any) -> Tensor:
        """Return the point ``x`` that a stream stands for, ``[..., d]``, for measurements along the depth."""
        return stream

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """How a weight with this role is drawn in a model of this depth."""
        return InitRule()

    def options(self) -> dict[str, Any]:
        """Every option with its value, JSON-able; ``create(name, **options)`` gives the same placement back."""
        return dataclasses.asdict(self)

    def changed_options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def label(self) -> str:
        """Short text for tables: the name, with what differs from the defaults in brackets."""
        changed = ", ".join(f"{key}={value}" for key, value in self.changed_options().items())
        return f"{self.name}({changed})" if changed else self.name


@dataclasses.dataclass(frozen=True)
class EntryPlacement(Placement):
    """A placement that can bring the embeddings to RMS 1 first.

    Options:
        normalize_entry: whether it does.
    """

    normalize_entry: bool = True

    def __post_init__(self) -> None:
        check_flag(self, "normalize_entry")

    def enter(self, h: Tensor) -> Tensor:
        """Return the embeddings at RMS 1, or as they are."""
        return unit_rms(h) if self.normalize_entry else h


def check_flag(placement: Placement, *names: str) -> None:
    """Check that these options are true or false.

    Raises:
        UserError: names the option.
    """
    for name in names:
        value = getattr(placement, name)
        if not isinstance(value, bool):
            raise UserError(f"`{name}` of placement {placement.name!r} must be true or false, got {value!r}")


def unit_rms(h: Tensor) -> Tensor:
    """Bring each row to RMS 1, that is length sqrt(d), in any floating dtype; arithmetic in float32 at least.

    ``[..., d]``. A zero row stays zero and passes its gradient on times sqrt(d), so that it can leave zero.
    """
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    # Scaled first, so that one over the length of a very short row stays finite.
    row = wide / geometry.row_scale(wide)
    length = geometry.norm(row)
    return (row * (math.sqrt(h.shape[-1]) / torch.where(length == 0, 1.0, length))).to(h.dtype)
