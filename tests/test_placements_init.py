"""Every placement in a model of one's own: how weights are drawn, a small model that trains, dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from geonorm import placements
from geonorm.placements import Wiring, base_std, create, parse
from placement_table import DEEP_ALPHA, DEEP_BETA, NAMES, SITE, TABLE, every_placement, wired
from tolerances import EPS, worst

# --- init -----------------------------------------------------------------------------------------------------------


@every_placement
def test_init_gains_by_role_at_twelve_layers(name):
    placement = create(name)
    for role, (kind, gain) in TABLE[name].gains_at_init.items():
        rule = placement.at(SITE.layer, 12).init_rule(role, 12)
        assert (rule.kind, rule.gain) == (kind, pytest.approx(gain, abs=1e-5)), role
    assert placement.weight_axes == TABLE[name].unit_axes
    assert name == "mix" or placement.at(SITE.layer, 12) is placement
    for role in ("embedding", "head"):
        assert placement.init_rule(role, 12) == placements.InitRule()


def test_deepnorm_constants_at_twelve_layers():
    placement = create("deepnorm")
    assert round(placement.alpha(12), 4) == 2.2134
    assert round(placement.beta(12), 4) == 0.3195
    assert wired("deepnorm", 8, torch.float32).connection.alpha == pytest.approx(DEEP_ALPHA, abs=1e-5)


@every_placement
def test_init_draws_what_the_rule_says(name):
    dim, layers = 256, 12
    wiring = Wiring(name, dim, layers)
    for role, (kind, gain) in {
        **TABLE[name].gains_at_init,
        "embedding": ("normal", 1.0),
        "head": ("normal", 1.0),
    }.items():
        shape = (4 * dim, dim) if role in ("mlp_input", "mlp_up") else (dim, dim)
        weight = torch.nn.Parameter(torch.full(shape, math.nan))
        assert wiring.init_(weight, role, SITE.layer) is weight
        std = 0.02 * math.sqrt(768 / dim) if kind == "normal" else math.sqrt(2 / sum(shape))
        if (axis := TABLE[name].unit_axes.get(role)) is not None:
            # Brought to length 1: the size of the draw is gone. A sum in float32, one rounding a term.
            bound = math.sqrt(shape[axis]) * EPS[torch.float32]
            assert worst(weight.double().norm(dim=axis), torch.ones(shape[1 - axis])) <= bound
            std = 1 / math.sqrt(shape[axis])
        # The standard error of a standard deviation over n draws is 1/sqrt(2n): five of them.
        assert float(weight.detach().std()) == pytest.approx(gain * std, rel=5 / math.sqrt(2 * weight.numel()))
        assert abs(float(weight.detach().mean())) <= 5 * gain * std / math.sqrt(weight.numel())


def test_each_layer_of_a_mixture_is_drawn_by_its_own_rule():
    wiring = Wiring("mix", 256, 4, first="deepnorm", share=0.5, rest="pre")
    drawn = [wiring.init_(torch.empty(256, 256), "mlp_output", layer).std() for layer in (1, 2, 3, 4)]
    base = 0.02 * math.sqrt(3)
    for std, expected in zip(drawn, [32**-0.25 / 16] * 2 + [base / math.sqrt(8)] * 2, strict=True):
        assert float(std) == pytest.approx(expected, rel=5 / math.sqrt(2 * 256**2))
    assert float(wiring.init_(torch.empty(256, 256), "head").std()) == pytest.approx(base, rel=0.02)


def test_starts_of_what_a_placement_learns():
    """Numbers of the papers; in float32, as they are stored."""
    rates = [connection.connection.rate for connection in Wiring("ngpt", 16, 3).connections]
    assert worst(torch.stack(rates), torch.full((6, 16), 1 / 4)) <= EPS[torch.float32]
    assert {connection.connection.factor for connection in Wiring("ngpt", 16, 3).connections} == {0.05 * 4}
    spheret = [connection.connection.alpha for connection in Wiring("spheret", 16, 3).connections]
    assert worst(torch.cat(spheret), torch.tensor([1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3])) <= 4 * EPS[torch.float32]
    nag = Wiring("nag", 512, 3)
    alphas = torch.cat([connection.connection.alpha for connection in nag.connections])
    assert worst(alphas, torch.arange(1, 7) ** -0.5) <= EPS[torch.float32]
    assert nag.connections[0].connection.weight.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * 4 * 512))
    hyper = Wiring("mhc", 512, 1)
    gates = [hyper.connections[0].connection.pre, hyper.connections[0].connection.post, hyper.exit_module.pre]
    for gate, bias in zip(gates, (-math.log(3), 0.0, -math.log(3)), strict=True):
        assert gate.weight.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * 4 * 4 * 512))
        assert worst(gate.bias, torch.full((4,), bias)) <= EPS[torch.float32]
        assert gate.scale.tolist() == [pytest.approx(0.01)]
    queries = [connection.connection.query.weight for connection in Wiring("attnres", 8, 2).connections]
    assert not torch.stack(queries).any()


def test_deepnorm_value_over_query_is_beta():
    wiring = Wiring("deepnorm", 256, 12)
    value, query = (wiring.init_(torch.empty(256, 256), role).std() for role in ("value", "query"))
    assert float(value / query) == pytest.approx(DEEP_BETA, rel=0.03)


def test_base_std_follows_the_width():
    assert base_std(768) == 0.02
    assert base_std(192) == pytest.approx(0.04)
    assert base_std(128) == pytest.approx(0.05, rel=0.03)


# --- in a model -----------------------------------------------------------------------------------------------------


class TinyModel(nn.Module):
    """Embedding, two layers of two linear sub-layers, head: the shape of a language model without the attention."""

    def __init__(self, placement, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.wiring = Wiring(placement, 16, 2, **options)
        for number, layer in enumerate(self.layers):
            self.wiring.init_(layer[0].weight, "mlp_input", number // 2 + 1)
            self.wiring.init_(layer[2].weight, "mlp_output", number // 2 + 1)
        self.wiring.init_(self.embedding.weight, "embedding")
        self.wiring.init_(self.head.weight, "head")

    def forward(self, tokens):
        stream = self.wiring.enter(self.embedding(tokens))
        for connection, layer in zip(self.wiring.connections, self.layers, strict=True):
            stream = connection(stream, layer)
        return self.head(self.wiring.exit(stream))


VARIANTS = [
    *NAMES,
    "geonorm:learnable=true",
    "geonorm:max_update_angle=0.7,learnable_angle=true",
    "geonorm:normalize_update=true,retraction=cayley,max_angle=none",
    "geonorm:retraction=1.5,decay=none,per=sublayer",
    "pre:normalize_entry=true",
    "slerp:decay=none,per=sublayer,alpha=0.5",
    "attnres:block_size=3",
    "mhc:iterations=2,streams=2",
    "nag:gates=2,beta=2",
    "hybrid:first_pre=true",
    "resi_dual:dual_scale=0.05",
    *(f"{name}:gain=channel,gain_start=0.5,norm=layernorm" for name in NAMES if name not in ("ngpt", "slerp")),
    "ngpt:gain=channel",
    "slerp:gain=scalar,norm=dyt",
]
# The first sub-layer of attention residuals has one source, whose weight is 1.
SILENT = {"attnres": {"wiring.connections.0.connection.query.weight"}}


@pytest.mark.parametrize("text", VARIANTS)
def test_a_small_model_trains(text):
    model = TinyModel(parse(text))
    tokens = torch.randint(0, 20, (8, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 20).flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        silent = {name for name, p in model.named_parameters() if not p.grad.any()}
        assert silent <= SILENT.get(model.wiring.placement.name, set())
        optimizer.step()
        for layer in model.layers:
            model.wiring.normalize_(layer[0].weight, "mlp_input")
            model.wiring.normalize_(layer[2].weight, "mlp_output")
        losses.append(float(loss.detach()))
    assert losses[0] < 1.5 * math.log(20)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("text", [t for t in VARIANTS if t.startswith(("geonorm", "spheret", "slerp", "ngpt"))])
def test_a_stream_on_a_sphere_stays_there(text):
    model = TinyModel(parse(text)).bfloat16()
    stream = model.wiring.enter(model.embedding(torch.arange(20)))
    for connection, layer in zip(model.wiring.connections, model.layers, strict=True):
        stream = connection(stream, layer)
        length = stream.double().norm(dim=-1) / (1 if text.startswith("ngpt") else 4)
        assert worst(length.detach(), torch.ones(20)) <= EPS[torch.bfloat16]


def test_wiring_takes_other_norms_and_shares_nothing():
    wiring = Wiring("sandwich", 8, 2, norm=nn.LayerNorm)
    norms = [module for module in wiring.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == len({id(norm) for norm in norms}) == 4 * 2 + 1
    assert len({p.data_ptr() for p in wiring.parameters()}) == len(list(wiring.parameters()))


@every_placement
def test_connections_compose_with_autocast(name):
    wiring, layer = Wiring(name, 16, 2), nn.Linear(16, 16)
    h = torch.randn(3, 5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = wiring.enter(h)
        for connection in wiring.connections:
            stream = connection(stream, layer)
        out = wiring.exit(stream)
    assert out.dtype == torch.float32
    out.square().sum().backward()
    assert bool(h.grad.isfinite().all())


@every_placement
def test_autocast_does_not_round_the_stream(name):
    wiring, h = Wiring(name, 16, 2), torch.randn(3, 5, 16)
    ends = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            stream = wiring.enter(h)
            for connection in wiring.connections:
                stream = connection(stream, torch.zeros_like)
            ends += [stream, wiring.exit(stream)]
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
