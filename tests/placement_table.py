"""The table of placements that the tests run over: what the literature says, written a second time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from geonorm import placements
from geonorm.placements import Site, Wiring


def rms(z, gain=1.0):
    return z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def great_circle(x, u, alpha):
    unit = x / x.norm(dim=-1, keepdim=True)
    v = u - (u * unit).sum(-1, keepdim=True) * unit
    theta = alpha * v.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)
    return x.norm(dim=-1, keepdim=True) * (theta.cos() * unit + theta.sin() * v / v.norm(dim=-1, keepdim=True))


def split(x, u):
    """Length of x, length of u across x, and of u along x."""
    r = x.norm(dim=-1)
    along = (u * x).sum(-1) / r
    return r, (u.square().sum(-1) - along.square()).sqrt(), along


@dataclasses.dataclass(frozen=True)
class Published:
    """What the literature says about one placement.

    ``gains`` are those of the norms, by slot. ``angle`` is the angle from x to the next stream where all gains are 1.
    ``unit_entry``: whether the stream starts at RMS 1 by default. ``stream``: what the MLP's connection is given for x.
    """

    reads: Callable
    update: Callable
    angle: Callable
    unit_entry: bool
    final_norm: bool
    gains_at_init: dict[str, tuple[str, float]]
    stream: Callable = lambda x: x


SITE = Site(2, "mlp", 12)
DEEP_ALPHA, DEEP_BETA = 2.213364, 0.319472
ROLES = ("query", "key", "value", "attention_output", "mlp_input", "mlp_up", "mlp_output")
PLAIN = dict.fromkeys(ROLES, ("normal", 1.0))
WRITES = dict.fromkeys(("attention_output", "mlp_output"), ("normal", 0.204124))
DEEP = dict.fromkeys(("value", "attention_output", "mlp_input", "mlp_up", "mlp_output"), ("xavier", DEEP_BETA))

TABLE = {
    "geonorm": Published(
        reads=lambda x, gains: x,
        update=lambda x, u, gains: great_circle(x, u, 1 / 2),
        angle=lambda x, u: split(x, u)[1] / (2 * split(x, u)[0]),
        unit_entry=True,
        final_norm=True,
        gains_at_init=PLAIN,
    ),
    "pre": Published(
        reads=lambda x, gains: rms(x, gains["input"]),
        update=lambda x, u, gains: x + u,
        angle=lambda x, u: torch.atan2(split(x, u)[1], split(x, u)[0] + split(x, u)[2]),
        unit_entry=False,
        final_norm=True,
        gains_at_init={**PLAIN, **WRITES},
    ),
    "post": Published(
        reads=lambda x, gains: x,
        update=lambda x, u, gains: rms(x + u, gains["stream"]),
        angle=lambda x, u: torch.atan2(split(x, u)[1], split(x, u)[0] + split(x, u)[2]),
        unit_entry=True,
        final_norm=False,
        gains_at_init=PLAIN,
    ),
    "deepnorm": Published(
        reads=lambda x, gains: x,
        update=lambda x, u, gains: rms(24**0.25 * x + u, gains["stream"]),
        angle=lambda x, u: torch.atan2(split(x, u)[1], 24**0.25 * split(x, u)[0] + split(x, u)[2]),
        unit_entry=True,
        final_norm=False,
        gains_at_init={**PLAIN, "query": ("xavier", 1.0), "key": ("xavier", 1.0), **DEEP},
    ),
    "sandwich": Published(
        reads=lambda x, gains: rms(x, gains["input"]),
        update=lambda x, u, gains: x + rms(u, gains["output"]),
        angle=lambda x, u: torch.atan2(split(x, rms(u))[1], split(x, rms(u))[0] + split(x, rms(u))[2]),
        unit_entry=True,
        final_norm=True,
        gains_at_init=PLAIN,
    ),
    "output": Published(
        reads=lambda x, gains: x,
        update=lambda x, u, gains: x + rms(u, gains["output"]),
        angle=lambda x, u: torch.atan2(split(x, rms(u))[1], split(x, rms(u))[0] + split(x, rms(u))[2]),
        unit_entry=True,
        final_norm=True,
        gains_at_init=PLAIN,
    ),
    # The attention of the same layer has returned x/2, which the MLP does not read.
    "parallel": Published(
        reads=lambda x, gains: rms(x, gains["input"]),
        update=lambda x, u, gains: 1.5 * x + u,
        angle=lambda x, u: torch.atan2(split(x, u)[1], 1.5 * split(x, u)[0] + split(x, u)[2]),
        unit_entry=False,
        final_norm=True,
        gains_at_init={**PLAIN, **dict.fromkeys(WRITES, ("normal", 0.263523))},
        stream=lambda x: (x, x / 2),
    ),
}
# Checked in tests/test_outside.py, against an implementation of others or a formula written there.
OUTSIDE = (
    "lns", "scaled_sandwich", "keel", "hybrid", "mix", "resi_dual", "siamese", "hyper", "mhc", "attnres", "ngpt",
    "slerp", "spheret", "nag",
)  # fmt: skip
NAMES = [name for name in placements.available() if name not in OUTSIDE]
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
