"""The table of placements that the tests run over: what the literature says, written a second time.

A row speaks of ``p``, the parameters of one connection by name and the gains of its norms by slot, and of streams: rows
``[..., d]``, or what a placement with several rows a token makes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from geonorm import placements
from geonorm.placements import Site, Wiring
from placement_formulas import (
    attended,
    between,
    centred,
    chord,
    chord_angle,
    gate,
    great_circle,
    mixed,
    nag,
    rate,
    rms,
    split,
    turned,
    unit,
    weighed,
    written,
)


@dataclasses.dataclass(frozen=True)
class Published:
    """What the literature says about one placement, at ``SITE`` but for the last two.

    Attributes:
        reads: what the sub-layer reads of a stream.
        update: the next stream, given the sub-layer's output u.
        angle: from a point to the next one, where the gains of norms are 1.
        entry: the RMS at which a point enters at width d by default; None for the embedding as it is.
        rows: the stream of an entry; ``stream``: what the MLP's connection is given for one, where that differs;
            ``other``: a stream whose rows differ; ``point``: the point of a stream.
        plane: what spans the plane of the step beside x.
        weak: u and p where the addend is multiplied by a factor.
        unit_axes: axis of weights ``[out, in]`` that is kept at length 1, by role.
        exit: what the final norm is given.
        still: the stream after three layers whose sub-layers return 0, from that at the entry, up to ``slack``.
    """

    reads: Callable
    update: Callable
    angle: Callable
    still: Callable = lambda x: x
    slack: float = 0.0
    entry: Callable | None = None
    final_norm: bool = True
    gains_at_init: dict[str, tuple[str, float]] = dataclasses.field(default_factory=lambda: PLAIN)
    unit_axes: dict[str, int] = dataclasses.field(default_factory=dict)
    rows: Callable = lambda x: x
    stream: Callable | None = None
    point: Callable = lambda stream: stream
    other: Callable | None = None
    plane: Callable = lambda u: u
    weak: Callable = lambda u, p, factor: (factor * u, p)
    exit: Callable = lambda stream, p: stream

    def between(self, x):
        return (self.stream or self.rows)(x)

    def distinct(self, x):
        return (self.other or self.stream or self.rows)(x)


def weaker(name):
    return lambda u, p, factor: (u, {**p, name: factor * p[name]})


def copies(x):
    return torch.stack((x,) * 4, -2)


SITE = Site(2, "mlp", 12)
DEEP_ALPHA, DEEP_BETA = 2.213364, 0.319472
ROLES = ("query", "key", "value", "attention_output", "mlp_input", "mlp_up", "mlp_output")
PLAIN = dict.fromkeys(ROLES, ("normal", 1.0))
WRITES = {**PLAIN, **dict.fromkeys(("attention_output", "mlp_output"), ("normal", 0.204124))}
DEEP = dict.fromkeys(("value", "attention_output", "mlp_input", "mlp_up", "mlp_output"), ("xavier", DEEP_BETA))
ONE = {"entry": lambda dim: 1.0}

GEO = Published(
    reads=lambda x, p: x,
    update=lambda x, u, p: great_circle(x, u, 1 / 2),
    angle=lambda x, u, p: split(x, u)[1] / (2 * split(x, u)[0]),
    **ONE,
)
PRE = Published(
    reads=lambda x, p: rms(x, p["input"]),
    update=lambda x, u, p: x + u,
    angle=lambda x, u, p: turned(1, x, u),
    gains_at_init=WRITES,
)
POST = Published(
    reads=lambda x, p: x,
    update=lambda x, u, p: rms(x + u, p["stream"]),
    angle=lambda x, u, p: turned(1, x, u),
    still=lambda x: rms(rms(rms(rms(rms(rms(x)))))),
    final_norm=False,
    **ONE,
)
SANDWICH = Published(
    reads=lambda x, p: rms(x, p["input"]),
    update=lambda x, u, p: x + rms(u, p["output"]),
    angle=lambda x, u, p: turned(1, x, rms(u)),
    weak=weaker("output"),
    **ONE,
)
HYPER = Published(
    reads=lambda s, p: rms(weighed(s, p), p["input"]),
    update=lambda s, u, p: s + written(s, u, p, 1e-6),
    angle=lambda x, u, p: turned(1, x, written(copies(x), u, p, 1e-6).mean(-2)),
    gains_at_init=WRITES,
    rows=copies,
    point=lambda s: s.mean(-2),
    other=lambda x: torch.stack((x, 0.5 * x.roll(1, -1), -x.flip(-1), 2 * x.roll(3, -1)), -2),
    exit=weighed,
)
changed = dataclasses.replace

TABLE = {
    "geonorm": GEO,
    "pre": PRE,
    "post": POST,
    "deepnorm": changed(
        POST,
        update=lambda x, u, p: rms(24**0.25 * x + u, p["stream"]),
        angle=lambda x, u, p: turned(24**0.25, x, u),
        # Three layers: alpha is 6 to the power 1/4.
        still=lambda x: (lambda n: n(n(n(n(n(n(x)))))))(lambda x: rms(6**0.25 * x)),
        gains_at_init={**PLAIN, "query": ("xavier", 1.0), "key": ("xavier", 1.0), **DEEP},
    ),
    "sandwich": SANDWICH,
    "output": changed(SANDWICH, reads=lambda x, p: x),
    # The attention of the same layer has returned x/2, which the MLP does not read.
    "parallel": changed(
        PRE,
        update=lambda s, u, p: s[0] + s[1] + u,
        reads=lambda s, p: rms(s[0], p["input"]),
        angle=lambda x, u, p: torch.atan2(split(x, u)[1], 1.5 * split(x, u)[0] + split(x, u)[2]),
        gains_at_init={**PLAIN, **dict.fromkeys(("attention_output", "mlp_output"), ("normal", 0.263523))},
        stream=lambda x: (x, x / 2),
    ),
    "lns": changed(PRE, reads=lambda x, p: rms(x, p["input"]) / 2**0.5, gains_at_init=PLAIN),
    "scaled_sandwich": changed(
        SANDWICH,
        update=lambda x, u, p: (4 / 5) ** 0.5 * x + rms(u, p["output"]) / 5**0.5,
        angle=lambda x, u, p: turned(2, x, rms(u)),
        still=lambda x: x / 7**0.5,
    ),
    "keel": Published(
        reads=lambda x, p: rms(x, p["input"]),
        update=lambda x, u, p: rms(24 * x + u, p["stream"]),
        angle=lambda x, u, p: turned(24, x, u),
        # The first attention leaves x, the first MLP normalises it, the four others have the weight 6.
        still=lambda x: (lambda n: n(n(n(n(rms(x))))))(lambda x: rms(6 * x)),
        final_norm=False,
    ),
    "hybrid": changed(
        PRE,
        reads=lambda x, p: rms(x, p["stream"]),
        update=lambda x, u, p: rms(x, p["stream"]) + u,
        angle=lambda x, u, p: turned(1, rms(x), u),
        still=lambda x: rms(rms(rms(x))),
    ),
    # Mix-LN: of twelve layers three are Post-Norm, of three one.
    "mix": changed(POST, still=lambda x: rms(rms(x)), final_norm=True),
    "resi_dual": changed(
        POST,
        reads=lambda s, p: s[..., 0, :],
        update=lambda s, u, p: torch.stack((rms(s[..., 0, :] + u, p["stream"]), s[..., 1, :] + u), -2),
        still=lambda s: torch.stack((POST.still(s[..., 0, :]), s[..., 1, :]), -2),
        rows=lambda x: torch.stack((x, x), -2),
        point=lambda s: s[..., 0, :],
        other=lambda x: torch.stack((x, 2 * x.flip(-1)), -2),
        exit=lambda s, p: s[..., 0, :] + rms(s[..., 1, :], p["dual"]),
    ),
    "siamese": changed(
        PRE,
        reads=lambda s, p: rms(rms(s[..., 0, :], p["stream"]) + rms(s[..., 1, :], p["second"]), p["input"]),
        update=lambda s, u, p: torch.stack((rms(s[..., 0, :], p["stream"]) + u / 2, s[..., 1, :] + u), -2),
        still=lambda s: torch.stack((POST.still(s[..., 0, :]), s[..., 1, :]), -2),
        rows=lambda x: torch.stack((x, x), -2),
        point=lambda s: s[..., 1, :],
        other=lambda x: torch.stack((x, 2 * x.flip(-1)), -2),
        exit=lambda s, p: rms(s[..., 0, :], p["first"]) + rms(s[..., 1, :], p["second"]),
    ),
    "hyper": HYPER,
    "mhc": changed(
        HYPER,
        update=lambda s, u, p: mixed(s, p) + written(s, u, p, 0.0),
        angle=lambda x, u, p: turned(1, mixed(copies(x), p).mean(-2), written(copies(x), u, p, 0.0).mean(-2)),
        # Columns sum to 1 but for the 1e-6 in their division.
        slack=6.1e-6,
    ),
    "attnres": changed(
        PRE,
        reads=lambda s, p: rms(attended(s, p), p["input"]),
        update=lambda s, u, p: torch.cat((s, u.unsqueeze(-2)), -2),
        still=lambda s: torch.cat((s, torch.zeros_like(s).repeat_interleave(6, -2)), -2),
        rows=lambda x: x.unsqueeze(-2),
        point=lambda s: s.sum(-2),
        other=lambda x: torch.stack((x, 2 * x.flip(-1), x.roll(1, -1)), -2),
        exit=attended,
    ),
    "ngpt": Published(
        reads=lambda x, p: x,
        update=chord,
        angle=lambda x, u, p: chord_angle(x, unit(u), rate(p)[0]),
        entry=lambda dim: dim**-0.5,
        final_norm=False,
        unit_axes={
            **dict.fromkeys(("query", "key", "value", "mlp_input", "mlp_up", "embedding", "head"), 1),
            **dict.fromkeys(("attention_output", "mlp_output"), 0),
        },
        weak=weaker("rate"),
    ),
    "slerp": changed(
        GEO,
        update=lambda x, u, p: between(x, u, 0.25 * p.get("part", 1.0)),
        angle=lambda x, u, p: torch.atan2(split(x, u)[1], split(x, u)[2]) / 4,
        weak=lambda u, p, factor: (u, {**p, "part": factor}),
    ),
    "spheret": changed(
        GEO,
        update=lambda x, u, p: great_circle(x, u, functional.softplus(p["raw_alpha"]), torch.atan),
        angle=lambda x, u, p: torch.atan(functional.softplus(p["raw_alpha"]) * split(x, u)[1] / split(x, u)[0]),
    ),
    "nag": Published(
        reads=lambda x, p: x / x.square().mean(-1, keepdim=True).sqrt(),
        update=nag,
        # alpha starts at one over the root of the sub-layer's number, 4.
        angle=lambda x, u, p: torch.atan(gate(x / x.square().mean(-1, keepdim=True).sqrt(), p) / 2).squeeze(-1),
        plane=centred,
        weak=weaker("alpha"),
    ),
}
NAMES = placements.available()
every_placement = pytest.mark.parametrize("name", NAMES)


class Recorder:
    """A sub-layer that notes what it reads and returns what it was given."""

    def __init__(self, output):
        self.output = output

    def __call__(self, h):
        self.read = h
        return self.output


def wired(name, dim, dtype, gains=None, **options):
    wiring = Wiring(name, dim, SITE.num_layers, **options).to(dtype)
    connection = wiring.connections[2 * (SITE.layer - 1) + (SITE.sublayer == "mlp")]
    for slot, norm in connection.norms.items():
        with torch.no_grad():
            norm.weight.copy_((gains or {}).get(slot, torch.ones(dim)))
    return connection


def parameters_of(connection):
    """Parameters of a wired connection in float64: its own by name, gains of its norms by slot."""
    named = {name: parameter.detach().double() for name, parameter in connection.connection.named_parameters()}
    return {**named, **{slot: norm.weight.detach().double() for slot, norm in connection.norms.items()}}
