"""What a placement is: the contract that every file in this folder fulfils.

A placement decides what happens to the residual stream around each sub-layer. It is a frozen set of options; the
modules it makes are its connections, one a sub-layer. The stream is opaque: whatever ``enter`` returns is handed from
connection to connection and given to ``exit``, so that schemes with several streams fit as well.

A new placement overrides ``enter``, ``connection``, ``exit`` and what else of the class it needs; a model calls
``open``, ``connect``, ``close``, which add the options that every placement has.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from geonorm import geometry
from geonorm.errors import UserError, check_count, unknown
from geonorm.placements.connection import Branch, Connection, EntrySkip, Exit, Learned, Norms, Sublayer
from geonorm.placements.norm_kinds import NORM_KINDS

__all__ = ["Connection", "Exit", "Learned", "Norms", "Placement", "Site", "Sublayer"]

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
GAINS = ("none", "scalar", "channel")
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
    """Where a connection sits: sub-layer ``sublayer`` of layer ``layer`` (counted from 1) of ``num_layers``.

    ``dim`` is the width of the stream; None where only the place is asked for.
    """

    layer: int
    sublayer: str
    num_layers: int
    dim: int | None = None

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers)
        if self.sublayer not in SUBLAYERS:
            raise unknown("sub-layer", self.sublayer, SUBLAYERS)
        if check_count("layer", self.layer) > self.num_layers:
            raise UserError(f"`layer` must lie in 1..{self.num_layers}, got {self.layer}")
        if self.dim is not None:
            check_count("dim", self.dim)

    @property
    def number(self) -> int:
        """The sub-layer's number in the model, counted from 1: attention 2l - 1, MLP 2l."""
        return 2 * self.layer - (self.sublayer == "attention")

    @property
    def width(self) -> int:
        """The width of the stream.

        Raises:
            UserError: it was not given.
        """
        if self.dim is None:
            raise UserError("this connection has parameters as wide as the stream; give the width: Site(..., dim=768)")
        return self.dim


@dataclasses.dataclass(frozen=True)
class Placement:
    """Base of every placement: a frozen dataclass whose fields are its options.

    Options of every placement:
        gain: what multiplies the addend of each sub-layer, learnable: ``"none"``; ``"scalar"``, one number a sub-layer
            (ReZero, arXiv 2003.04887, from ``gain_start=0``); ``"channel"``, one a channel (LayerScale, arXiv
            2103.17239). The addend is what is added to the stream: after an output norm, before a norm of the stream.
        gain_start: its start.
        warm_depth: T; the addend of layer l is multiplied by ``min(t / (T l), 1)`` at training step t, counted from 1
            (ProRes, arXiv 2603.05369, T = 1000). None for not at all. See :func:`set_training_step`.
        entry_skip: before each layer ``x <- lambda x + mu x_0`` with x_0 the entry, both learnable, from 1 and 0 (the
            x0 lambdas of nanochat).
        norm: kind of every norm of the placement and of the final one: ``"rmsnorm"``, ``"layernorm"``, ``"dyt"``
            (arXiv 2503.10622); None for the model's own kind.

    Class attributes:
        name: how users ask for it.
        norms: slots of the norms that its connections use: ``"input"`` (on what the sub-layer reads), ``"output"`` (on
            what it returns), ``"stream"`` (on the stream after the addition), or others of its own.
        exit_norms: slots of the norms that its exit uses.
        final_norm: whether the model's own norm before the head stays.
        single_stream: whether the stream is one row a token; else it is ``[..., rows, d]``.
        weight_axes: which axis of a weight ``[out, in]`` is brought to length 1 after each step of the optimiser, by
            role; see :func:`geonorm.models.normalize_weights`.
    """

    name: ClassVar[str] = ""
    norms: ClassVar[tuple[str, ...]] = ()
    exit_norms: ClassVar[tuple[str, ...]] = ()
    final_norm: ClassVar[bool] = True
    single_stream: ClassVar[bool] = True
    weight_axes: ClassVar[Mapping[Role, int]] = {}

    gain: Literal["none", "scalar", "channel"] = dataclasses.field(default="none", kw_only=True)
    gain_start: float = dataclasses.field(default=1.0, kw_only=True)
    warm_depth: int | None = dataclasses.field(default=None, kw_only=True)
    entry_skip: bool = dataclasses.field(default=False, kw_only=True)
    norm: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_flag(self, "entry_skip")
        if self.gain not in GAINS:
            raise unknown("gain", self.gain, GAINS)
        if type(self.gain_start) not in (int, float) or not abs(self.gain_start) <= sys.float_info.max:
            raise UserError(f"`gain_start` must be a finite number, got {self.gain_start!r}")
        if self.gain == "none" and self.gain_start != 1.0:
            raise UserError("`gain_start` is the start of a gain, and `gain` is none; give gain=scalar or gain=channel")
        if self.warm_depth is not None:
            check_count("warm_depth", self.warm_depth)
        if self.norm is not None and self.norm not in list(NORM_KINDS):
            raise unknown("norm", self.norm, NORM_KINDS)
        if self.entry_skip and not self.single_stream:
            raise UserError(f"`entry_skip` needs a stream of one row a token, and placement {self.name!r} has several")

    # --- what a placement overrides ---

    def enter(self, h: Tensor) -> Any:
        """Make the stream from the token embeddings ``[..., d]``."""
        return h

    def connection(self, site: Site) -> Connection:
        """Make the connection for one sub-layer."""
        raise NotImplementedError("a placement defines connection")

    def slots(self, site: Site) -> tuple[str, ...]:
        """Slots of the norms at one site."""
        return self.norms

    def exit(self, stream: Any) -> Tensor:
        """Return what the final norm, or the head where there is none, reads: ``[..., d]``."""
        return stream

    def exit_module(self, dim: int) -> Exit | None:
        """Make the module that stands in the place of ``exit`` where that needs norms or parameters."""
        return None

    def inside(self, place: str, size: int, dim: int, head_dim: int) -> Learned | None:
        """Make the module that changes what happens inside a sub-layer or the head.

        Args:
            place: a weight's role, for a module that is given what that projection returns, ``[..., size]``; or
                ``"heads"``, for one that is given query, key and the factor on their products after any rotation,
                ``[..., heads, tokens, head_dim]``, and returns the three.
            size: number of features; for ``"heads"`` those of all query heads.
            dim: width of the stream.
            head_dim: width of a head; 0 where there is none.
        """
        return None

    def point(self, stream: Any) -> Tensor:
        """Return the point ``x`` that a stream stands for, ``[..., d]``, for measurements along the depth."""
        return stream

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """How a weight with this role is drawn in a model of this depth."""
        return InitRule()

    def at(self, layer: int, num_layers: int) -> Placement:
        """The placement that rules in one layer, counted from 1: this one, but for mixtures."""
        return self

    # --- what a model calls ---

    def open(self, h: Tensor) -> Any:
        """Make the stream from the token embeddings ``[..., d]``, with x_0 beside it where that is skipped to."""
        stream = self.enter(h)
        return torch.stack((stream, stream), -2) if self.entry_skip else stream

    def connect(self, site: Site) -> Connection:
        """Make the connection for one sub-layer, with the options of every placement."""
        connection = self.at(site.layer, site.num_layers).connection(site)
        if self.gain != "none" or self.warm_depth is not None:
            width = site.width if self.gain == "channel" else 1
            period = None if self.warm_depth is None else self.warm_depth * site.layer
            connection.branch = Branch(None if self.gain == "none" else width, self.gain_start, period)
        return EntrySkip(connection, site.sublayer == "attention") if self.entry_skip else connection

    def close(self, stream: Any, module: Exit | None = None, norms: Norms | None = None) -> Tensor:
        """Return what the final norm, or the head where there is none, reads: ``[..., d]``."""
        if self.entry_skip:
            stream = stream[..., 0, :]
        return self.exit(stream) if module is None else module(stream, norms or {})

    def point_of(self, stream: Any) -> Tensor:
        """Return the point ``x`` that a stream made by ``open`` stands for, ``[..., d]``."""
        if not self.entry_skip:
            return self.point(stream)
        # Within a layer the entry stands beside it in a pair.
        return self.point(stream[0] if isinstance(stream, tuple) else stream[..., 0, :])

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
        super().__post_init__()
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
