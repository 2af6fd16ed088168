"""Placements with maths of their own: derivatives, rows of zeros and other edges, two steps on a sphere compared."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call

from geonorm import geometry
from geonorm.placements import Wiring, unit_rms
from geonorm.placements.norm_kinds import DyT
from placement_table import TABLE, Recorder, every_placement, wired
from tolerances import EPS, SAME_64, worst

# Placements whose connections are more than sums, products and norms; two rows a token at most, for the sake of time.
CURVED = {
    "slerp": {},
    "nag": {"gates": 2, "beta": 1.5},
    "ngpt": {},
    "spheret": {},
    "hyper": {"streams": 2},
    "mhc": {"streams": 2, "iterations": 3},
    "attnres": {},
}


def shaken(module, by=0.3):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("name", CURVED)
def test_derivatives_of_a_connection(name, second):
    """First and second, with respect to stream, sub-layer output and every parameter."""
    dim, tokens = 4, 2
    wiring = shaken(Wiring(name, dim, 2, **CURVED[name]).double())
    connection = wiring.connections[3]
    names, parameters = zip(*connection.named_parameters(), strict=True) if list(connection.parameters()) else ((), ())
    x = torch.randn(tokens, dim, dtype=torch.float64)
    stream = torch.stack((x, x.flip(-1)), -2) if name in ("hyper", "mhc") else TABLE[name].distinct(x)
    u = torch.randn(tokens, dim, dtype=torch.float64)

    def step(stream, u, *values):
        return functional_call(connection, dict(zip(names, values, strict=True)), (stream, lambda z: u + torch.sin(z)))

    inputs = [value.detach().clone().requires_grad_() for value in (stream, u, *parameters)]
    assert (torch.autograd.gradgradcheck if second else torch.autograd.gradcheck)(step, inputs)


def test_derivatives_of_dyt():
    norm = shaken(DyT(4).double())
    names, parameters = zip(*norm.named_parameters(), strict=True)

    def squash(x, *values):
        return functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    inputs = [value.detach().clone().requires_grad_() for value in (torch.randn(3, 4).double(), *parameters)]
    assert torch.autograd.gradcheck(squash, inputs)
    assert torch.autograd.gradgradcheck(squash, inputs)


# --- edges ----------------------------------------------------------------------------------------------------------

EDGES = {
    "stream of zeros": lambda x, u: (0 * x, u),
    "output of zeros": lambda x, u: (x, 0 * u),
    "both of zeros": lambda x, u: (0 * x, 0 * u),
    "output along the stream": lambda x, u: (x, 3 * x),
    "output against the stream": lambda x, u: (x, -x),
    "constant output": lambda x, u: (x, torch.ones_like(u)),
    "constant both": lambda x, u: (torch.ones_like(x), torch.ones_like(u)),
    "tiny": lambda x, u: (x, 1e-30 * u),
    # The angle of geonorm's step is that long in radians; its square is still a number.
    "huge": lambda x, u: (x, 1e15 * u),
}


@every_placement
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edge", EDGES)
def test_nothing_is_nan_at_the_edges(name, edge, dtype):
    """Values and gradients, of rows beside common ones; what a zero row has no direction for leaves it as it is."""
    dim, row = 16, TABLE[name]
    connection = wired(name, dim, dtype)
    x, u = unit_rms(torch.randn(3, dim)), torch.randn(3, dim)
    odd, update = EDGES[edge](x[1], u[1])
    x[1], u[1] = odd, update
    x, u = x.to(dtype).requires_grad_(), u.to(dtype).requires_grad_()
    stream = row.rows(x) if name != "parallel" else (x, 0 * x)
    y = connection(stream, lambda z: u + 0 * z)
    assert y.dtype == dtype
    assert bool(y.isfinite().all())
    (y.float() * torch.randn(y.shape)).mean().backward()
    for value in (x, u, *connection.parameters()):
        assert value.grad is not None
        assert bool(value.grad.isfinite().all())
    common = connection(row.rows(x[:1]) if name != "parallel" else (x[:1], 0 * x[:1]), Recorder(u[:1]))
    # Rows do not see each other, whatever is in one of them.
    assert worst(y[:1], common) <= (4 * EPS[dtype] if dtype == torch.bfloat16 else 32 * EPS[dtype])


@every_placement
def test_a_bfloat16_model_stays_bfloat16(name):
    wiring = Wiring(name, 16, 3).bfloat16()
    layer, h = torch.nn.Linear(16, 16).bfloat16(), torch.randn(4, 16).bfloat16().requires_grad_()
    stream = wiring.enter(h)
    for connection in wiring.connections:
        stream = connection(stream, layer)
        assert all(part.dtype == torch.bfloat16 for part in (stream if isinstance(stream, tuple) else (stream,)))
    out = wiring.exit(stream)
    assert (out.dtype, out.shape) == (torch.bfloat16, (4, 16))
    out.float().square().mean().backward()
    assert bool(h.grad.isfinite().all())


# --- along the great circle and along the chord ---------------------------------------------------------------------


def stepped(name, part, x, u):
    """Angle of the step that goes a part of the way from x to u; nothing of it by a gain of 0."""
    options = {"alpha": part or 0.3, "decay": "none"} if name == "slerp" else {"rate": part or 0.3}
    connection = wired(
        name, x.shape[-1], torch.float64, **options, **({} if part else {"gain": "scalar", "gain_start": 0.0})
    )
    if name == "ngpt":
        with torch.no_grad():
            # The start is stored in float32.
            connection.connection.rate.fill_(1 / math.sqrt(x.shape[-1]))
        return geometry.angle(x, connection(x / x.norm(dim=-1, keepdim=True), Recorder(u)))
    return geometry.angle(x, connection(x, Recorder(u)))


@pytest.mark.parametrize("part", [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
def test_the_chord_lags_the_great_circle_by_a_known_law(part):
    """phi = acos(((1-a) + a cos t) / sqrt((1-a)^2 + a^2 + 2 a (1-a) cos t)) against a t; equal at 0, 1/2 and 1."""
    x, u = unit_rms(torch.randn(400, 16, dtype=torch.float64)), torch.randn(400, 16, dtype=torch.float64)
    # From rows that nearly agree to rows that are nearly opposite.
    u = u + torch.linspace(-8, 8, 400, dtype=torch.float64)[:, None] * x
    t = geometry.angle(x, u)
    assert t.min() < 0.3
    assert t.max() > 2.8
    arc, chord = (stepped(name, part, x, u) for name in ("slerp", "ngpt"))
    cosine = ((1 - part) + part * t.cos()) / ((1 - part) ** 2 + part**2 + 2 * part * (1 - part) * t.cos()).sqrt()
    assert worst(arc, part * t) <= SAME_64
    # An arc cosine has half the digits near 0 and pi.
    assert worst(chord, torch.acos(cosine.clamp(-1, 1))) <= math.sqrt(SAME_64)
    assert worst(chord, torch.atan2(part * t.sin(), 1 - part + part * t.cos())) <= SAME_64
    if part in (0.0, 0.5, 1.0):
        assert worst(chord, arc) <= SAME_64
    elif part < 0.5:
        assert bool((chord < arc).all())
    else:
        assert bool((chord > arc).all())
