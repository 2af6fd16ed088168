"""Placements that nobody publishes as a package, against their formulas, in float64: forward and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from outside_walks import DIM, LAYERS, assert_same, every_parameter, made, walked


def rms(x, norm=None):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1.0 if norm is None else norm.weight)


def test_lns_by_its_formula():
    wiring, maps, h = made("lns")
    parameters, x = every_parameter(wiring, maps, h), h
    for number, (connection, sublayer) in enumerate(zip(wiring.connections, maps, strict=True)):
        x = x + sublayer(rms(x, connection.norms["input"]) / math.sqrt(number // 2 + 1))
    assert_same(walked(wiring, maps, h), rms(x, wiring.final_norm), parameters)


def test_resi_dual_by_the_authors_layer():
    wiring, maps, h = made("resi_dual", dual_scale=0.05, exit_scale=0.7)
    parameters = every_parameter(wiring, maps, h)
    x = h / h.square().mean(-1, keepdim=True).sqrt()
    dual = 0.05 * x
    for connection, sublayer in zip(wiring.connections, maps, strict=True):
        update = sublayer(x)
        dual = dual + update * 0.05
        x = rms(x + update, connection.norms["stream"])
    assert_same(walked(wiring, maps, h), 0.7 * x + rms(dual, wiring.exit_norms["dual"]), parameters)


def test_siamese_by_the_authors_block():
    wiring, maps, h = made("siamese")
    parameters, x, y = every_parameter(wiring, maps, h), h, h
    for number, (connection, sublayer) in enumerate(zip(wiring.connections, maps, strict=True)):
        norms, c = connection.norms, ((number // 2 + 1) * 2) ** 0.5
        x = rms(x, norms["stream"])
        z = sublayer(rms(x + rms(y, norms["second"]), norms["input"]))
        x, y = x + z / c, y + z
    out = rms(rms(x, wiring.exit_norms["first"]) + rms(y, wiring.exit_norms["second"]), wiring.final_norm)
    assert_same(walked(wiring, maps, h), out, parameters)


@pytest.mark.parametrize("first_pre", [False, True])
def test_hybrid_by_the_authors_block(first_pre):
    wiring, maps, h = made("hybrid", first_pre=first_pre)
    parameters, x = every_parameter(wiring, maps, h), h
    for layer in range(LAYERS):
        attention, mlp = wiring.connections[2 * layer : 2 * layer + 2]
        if first_pre and layer == 0:
            x = x + maps[0](rms(x, attention.norms["input"]))
            x = x + maps[1](rms(x, mlp.norms["input"]))
            continue
        x = rms(x + maps[2 * layer](x), mlp.norms["stream"])
        x = x + maps[2 * layer + 1](x)
    assert_same(walked(wiring, maps, h), rms(x, wiring.final_norm), parameters)


def test_nag_by_its_formula():
    wiring, maps, h = made("nag", gates=3, beta=1.5)
    parameters, x = every_parameter(wiring, maps, h), h
    for connection, sublayer in zip(wiring.connections, maps, strict=True):
        own = connection.connection
        rho = x.square().mean(-1, keepdim=True).sqrt()
        r = x / rho
        f = sublayer(r)
        f = f - f.mean(-1, keepdim=True)
        across = f - (f * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
        u = math.sqrt(DIM) * across / across.norm(dim=-1, keepdim=True)
        m = sum(
            p * torch.sigmoid((w * r).sum(-1, keepdim=True) + b)
            for p, w, b in zip(own.mixture.softmax(0), own.weight, own.bias, strict=True)
        )
        x = x + rho * own.alpha * m**1.5 * u
    assert_same(walked(wiring, maps, h), rms(x, wiring.final_norm), parameters)


def test_slerp_by_its_formula():
    wiring, maps, h = made("slerp", alpha=0.8, per="layer")
    parameters = every_parameter(wiring, maps, h)
    x = h / h.norm(dim=-1, keepdim=True)
    for number, (_, sublayer) in enumerate(zip(wiring.connections, maps, strict=True)):
        f = sublayer(math.sqrt(DIM) * x)
        f = f / f.norm(dim=-1, keepdim=True)
        t, a = torch.acos((x * f).sum(-1, keepdim=True)), 0.8 / math.sqrt(number // 2 + 1)
        x = (torch.sin((1 - a) * t) * x + torch.sin(a * t) * f) / torch.sin(t)
    assert_same(walked(wiring, maps, h), rms(math.sqrt(DIM) * x, wiring.final_norm), parameters)


def test_a_mixture_is_the_placements_themselves():
    wiring, maps, h = made("mix", first="post", share=0.5, rest="pre")
    parameters = every_parameter(wiring, maps, h)
    x = h / h.square().mean(-1, keepdim=True).sqrt()
    for number, (connection, sublayer) in enumerate(zip(wiring.connections, maps, strict=True)):
        if number < LAYERS:
            x = rms(x + sublayer(x), connection.norms["stream"])
        else:
            x = x + sublayer(rms(x, connection.norms["input"]))
    assert_same(walked(wiring, maps, h), rms(x, wiring.final_norm), parameters)
