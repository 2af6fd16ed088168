"""Formulas of the literature, written a second time in plain tensor algebra: of norms, steps on a sphere, streams.

``p`` holds the parameters of one connection by name and the gains of its norms by slot.
"""

from __future__ import annotations

import math

import torch


def length(z):
    return z.norm(dim=-1, keepdim=True)


def unit(z):
    return z / length(z)


def rms(z, gain=1.0):
    return z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def great_circle(x, u, alpha, phi=lambda t: t):
    v = u - (u * unit(x)).sum(-1, keepdim=True) * unit(x)
    theta = phi(alpha * length(v) / length(x))
    return length(x) * (theta.cos() * unit(x) + theta.sin() * unit(v))


def between(x, u, part):
    """The point of the great circle from x to u, ``part`` of the way: Shoemake's formula."""
    t = torch.acos((unit(x) * unit(u)).sum(-1, keepdim=True))
    return length(x) * (torch.sin((1 - part) * t) * unit(x) + torch.sin(part * t) * unit(u)) / torch.sin(t)


def rate(p):
    """nGPT's lambda: stored at 1/sqrt(d), 0.05 at first."""
    return 0.05 * (p["rate"] * math.sqrt(len(p["rate"]))).abs()


def chord(x, u, p):
    return unit(x + rate(p) * (unit(u) - x))


def chord_angle(x, u, a):
    """The angle of a step that goes the part a of the chord from x to u, both of length 1, and back to the sphere."""
    _, sine, cosine = split(x, u)
    return torch.atan2(a * sine, 1 - a + a * cosine)


def split(x, u):
    """Length of x, length of u across x, and of u along x."""
    r = x.norm(dim=-1)
    along = (u * x).sum(-1) / r
    return r, (u.square().sum(-1) - along.square()).sqrt(), along


def turned(scale, x, u):
    """Angle from x to ``scale x + u``."""
    r, across, along = split(x, u)
    return torch.atan2(across, scale * r + along)


def centred(u):
    return u - u.mean(-1, keepdim=True)


def nag(x, u, p):
    size = x.square().mean(-1, keepdim=True).sqrt()
    across = centred(u) - (centred(u) * unit(x)).sum(-1, keepdim=True) * unit(x)
    return x + size * p["alpha"] * gate(x / size, p) * math.sqrt(x.shape[-1]) * unit(across)


def gate(r, p):
    return (torch.sigmoid(r @ p["weight"].mT + p["bias"]) * p["mixture"].softmax(0)).sum(-1, keepdim=True)


def logits(streams, p, name):
    """``a <w, r> + b`` with all streams of a token as one row at RMS 1."""
    r = rms(streams.flatten(-2))
    return p[f"{name}.scale"] * (r @ p[f"{name}.weight"].mT) + p[f"{name}.bias"]


def weighed(streams, p):
    return torch.einsum("...n,...nd->...d", torch.sigmoid(logits(streams, p, "pre")) + 1e-6, streams)


def written(streams, u, p, floor):
    return torch.einsum("...n,...d->...nd", 2 * torch.sigmoid(logits(streams, p, "post")) + floor, u)


def mixed(streams, p):
    """Columns and rows to sum 1 in turn, twenty times columns, from a softmax that prefers each stream's own."""
    own = logits(streams, p, "comb").unflatten(-1, (4, 4)) + 8 * torch.eye(4)
    matrix = own.softmax(-1) + 1e-6
    for turn in range(39):
        matrix = matrix / (matrix.sum(-1 if turn % 2 else -2, keepdim=True) + 1e-6)
    return torch.einsum("...ji,...jd->...id", matrix, streams)


def attended(sources, p):
    """Softmax over ``<w, n(V_i)>``."""
    weights = (rms(sources) * p["query.weight"]).sum(-1).softmax(-1)
    return (weights.unsqueeze(-1) * sources).sum(-2)
