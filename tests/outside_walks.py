"""The same small sub-layers around a placement and around what it is compared with, in float64."""

from __future__ import annotations

import torch
from torch import nn

from geonorm.placements import Wiring
from tolerances import worst

DIM, LAYERS = 16, 4
# The issue of comparing two programs: a few hundred roundings of float64 on numbers near 1.
SAME = 1e-10


class Map(nn.Module):
    """A sub-layer: ``[..., 16]`` in and out; other arguments that a block hands over are not looked at."""

    def __init__(self, attention=False):
        super().__init__()
        self.inner, self.outer, self.attention = nn.Linear(DIM, 24), nn.Linear(24, DIM), attention

    def forward(self, h=None, *args, hidden_states=None, **kwargs):
        output = self.outer(torch.tanh(self.inner(hidden_states if h is None else h)))
        return (output, None, None)[: self.attention] if self.attention else output


def shaken(module):
    """Every parameter off its start, so that none can hide."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def made(name, **options):
    """Wiring, sub-layers and embeddings of one seed."""
    torch.manual_seed(0)
    wiring = shaken(Wiring(name, DIM, LAYERS, **options).double())
    return wiring, [Map().double() for _ in range(2 * LAYERS)], torch.randn(2, 5, DIM, dtype=torch.float64)


def walked(wiring, maps, h, layers=LAYERS):
    """The stream after some layers, and what the head reads after all."""
    stream = wiring.enter(h)
    for connection, sublayer in zip(wiring.connections[: 2 * layers], maps, strict=False):
        stream = connection(stream, sublayer)
    return wiring.exit(stream) if layers == LAYERS else stream


def assert_same(ours, theirs, parameters):
    """Both results, and the gradients of a weighted sum of each with respect to the same parameters."""
    assert worst(ours, theirs) <= SAME
    weights = torch.randn_like(ours)
    mine, other = (torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, theirs))
    for one, two in zip(mine, other, strict=True):
        assert worst(one, two) <= SAME


def every_parameter(wiring, maps, h):
    h.requires_grad_()
    return [h, *wiring.parameters(), *(p for sublayer in maps for p in sublayer.parameters())]
