"""Placements in use: init, a small model that trains, options and names, and what users get wrong."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from geonorm import UserError, placements
from geonorm.placements import Site, Wiring, base_std, create, parse
from placement_table import DEEP_ALPHA, DEEP_BETA, NAMES, SITE, TABLE, every_placement, wired
from tolerances import EPS, worst

# --- init -----------------------------------------------------------------------------------------------------------


@every_placement
def test_init_gains_by_role_at_twelve_layers(name):
    placement = create(name)
    for role, (kind, gain) in TABLE[name].gains_at_init.items():
        rule = placement.init_rule(role, 12)
        assert (rule.kind, rule.gain) == (kind, pytest.approx(gain, abs=1e-5)), role
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
        assert wiring.init_(weight, role) is weight
        std = 0.02 * math.sqrt(768 / dim) if kind == "normal" else math.sqrt(2 / sum(shape))
        # The standard error of a standard deviation over n draws is 1/sqrt(2n): five of them.
        assert float(weight.detach().std()) == pytest.approx(gain * std, rel=5 / math.sqrt(2 * weight.numel()))
        assert abs(float(weight.detach().mean())) <= 5 * gain * std / math.sqrt(weight.numel())


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
        for layer in self.layers:
            self.wiring.init_(layer[0].weight, "mlp_input")
            self.wiring.init_(layer[2].weight, "mlp_output")
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
]


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
        assert all(bool(p.grad.any()) for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] < 1.5 * math.log(20)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("text", [text for text in VARIANTS if text.startswith("geonorm")])
def test_the_stream_of_geonorm_stays_on_its_sphere(text):
    model = TinyModel(parse(text)).bfloat16()
    stream = model.wiring.enter(model.embedding(torch.arange(20)))
    for connection, layer in zip(model.wiring.connections, model.layers, strict=True):
        stream = connection(stream, layer)
        length = stream.double().norm(dim=-1) / 4
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


# --- options and names ----------------------------------------------------------------------------------------------


@every_placement
def test_options_round_trip(name):
    default = create(name)
    assert create(name, **default.options()) == default == create(default)
    assert default.changed_options() == {}
    assert default.label() == name
    assert repr(create(name).connection(SITE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.name2 = 1


def test_create_changes_an_existing_placement_and_labels_it():
    placement = create(create("geonorm", alpha=2.0), decay="sqrt")
    assert placement.changed_options() == {"alpha": 2.0, "decay": "sqrt"}
    assert placement.label() == "geonorm(alpha=2.0, decay=sqrt)"


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("pre", "pre", {}),
        (" geonorm : alpha = 2 , decay = sqrt ", "geonorm", {"alpha": 2.0, "decay": "sqrt"}),
        ("geonorm:alpha=1e-4", "geonorm", {"alpha": 1e-4}),
        ("geonorm:max_angle=none", "geonorm", {}),
        ("geonorm:max_angle=NONE,learnable=True", "geonorm", {"learnable": True}),
        ("geonorm:decay=none", "geonorm", {"decay": "none"}),
        ("geonorm:retraction=3", "geonorm", {"retraction": 3.0}),
        ("geonorm:retraction=cayley,per=sublayer,", "geonorm", {"retraction": "cayley", "per": "sublayer"}),
        ("sandwich:normalize_entry=false", "sandwich", {"normalize_entry": False}),
        ("deepnorm:beta_on_up=false", "deepnorm", {"beta_on_up": False}),
    ],
)
def test_parse(text, name, options):
    placement = parse(text)
    assert placement.name == name
    assert placement.changed_options() == options


class Law(str, enum.Enum):
    SQRT = "sqrt"


def other_values(value):
    """The same option as other libraries, and careless callers, write it."""
    if isinstance(value, bool):
        return [np.bool_(value), np.array(value), torch.tensor(value)]
    if isinstance(value, float):
        kinds = [np.float16, np.float32, np.float64, np.longdouble, torch.tensor, np.array, fractions.Fraction]
        return [kind(value) for kind in kinds] + [torch.tensor(value, dtype=torch.bfloat16, requires_grad=True)]
    if isinstance(value, str):
        return [np.str_(value), np.array(value)]
    if isinstance(value, list):
        return [tuple(value), np.array(value), torch.tensor(value), [np.float32(item) for item in value]]
    return [value]


# Values that every type above holds exactly.
CHANGED = {"alpha": 0.5, "decay": "sqrt", "per": "sublayer", "retraction": "cayley", "max_angle": 0.75}


@every_placement
@pytest.mark.parametrize("door", ["create", "change", "wiring"])
def test_every_option_becomes_a_plain_value_at_the_door(name, door):
    doors = {
        "create": lambda options: create(name, **options),
        "change": lambda options: create(create(name), **options),
        "wiring": lambda options: Wiring(name, 8, 2, **options).placement,
    }
    tried = {**create(name).options(), **{key: CHANGED[key] for key in CHANGED if key in create(name).options()}}
    if "alphas" in tried:
        tried["alphas"] = [0.5, 0.25, 1.0, 2.0]
    for option, value in tried.items():
        for other in other_values(not value if isinstance(value, bool) else value):
            expected = not value if isinstance(value, bool) else value
            found = doors[door]({option: other}).options()[option]
            assert found == expected, (option, other)
            assert type(found) is type(expected), (option, other)
            assert isinstance(json.dumps(found), str)
            assert not isinstance(found, list) or {type(item) for item in found} == {float}


def test_whole_numbers_become_floating_point_ones_and_enumerations_text():
    placement = create("geonorm", alpha=np.int64(2), max_angle=1, retraction=3, decay=Law.SQRT)
    assert placement.label() == "geonorm(alpha=2.0, decay=sqrt, retraction=3.0, max_angle=1.0)"
    assert type(placement.decay) is str
    assert create("geonorm", alphas=[1, np.int32(2)]).alphas == (1.0, 2.0)
    assert create(np.str_("pre")) == create("pre")


MISTAKES = {
    "array for a number": (lambda: create("geonorm", alpha=np.ones(2)), r"`alpha` must be a positive number, got \["),
    "numpy nan": (lambda: create("geonorm", alpha=np.float32("nan")), "`alpha` must be positive, got nan"),
    "huge": (lambda: create("geonorm", alpha=10**400), "`alpha` must be positive, got 1000"),
    "complex": (lambda: create("geonorm", alpha=np.complex64(1)), "`alpha` must be a number.*, got a complex"),
    "object": (lambda: create("geonorm", decay=object()), "`decay` must be a number, true, false, text.*got a object"),
    "no value": (lambda: create("geonorm", alpha=torch.ones((), device="meta")), "`alpha` holds no plain value"),
    "one for true": (lambda: create("geonorm", learnable=np.int64(1)), "`learnable` of placement 'geonorm' must be"),
    "in a list": (lambda: create("geonorm", alphas=[1.0, object()]), r"`alphas\[1\]` must be a number"),
    "flag": (lambda: create("deepnorm", beta_on_up="no"), "`beta_on_up` of placement 'deepnorm' must be true or false"),
    "array for a name": (lambda: create(np.array(["pre", "post"])), "unknown placement"),
    "name": (lambda: create("sandwitch"), "unknown placement 'sandwitch'; did you mean 'sandwich'.*: attnres"),
    "gain of an angle": (lambda: create("slerp", gain="channel"), "multiplies an angle, one a row: take gain=scalar"),
    "none": (lambda: create(None), "unknown placement None"),
    "list": (lambda: create(["pre"]), "unknown placement"),
    "option": (lambda: create("geonorm", alhpa=1), "option of placement 'geonorm' 'alhpa'; did you mean 'alpha'"),
    "foreign option": (lambda: create("pre", alpha=1), r"placement 'pre' 'alpha' \(known: entry_skip.*normalize_entry"),
    "alpha": (lambda: create("geonorm", alpha=-1), "`alpha` must be positive, got -1"),
    "alpha text": (lambda: create("geonorm", alpha="big"), "`alpha` must be a positive number, got 'big'"),
    "decay": (lambda: create("geonorm", decay="harmony"), "unknown decay 'harmony'; did you mean 'harmonic'"),
    "decay list": (lambda: create("geonorm", decay=["sqrt"]), "unknown decay"),
    "retraction": (lambda: create("geonorm", retraction="expo"), "unknown retraction 'expo'"),
    "max_angle": (lambda: create("geonorm", max_angle=0), "`max_angle` must be positive, got 0"),
    "per": (lambda: create("geonorm", per="block"), "`per` must be 'layer' or 'sublayer', got 'block'"),
    "learnable": (lambda: create("geonorm", learnable=1), "`learnable` of placement 'geonorm' must be .*, got 1"),
    "limit": (lambda: create("geonorm", max_update_angle=0), "`max_update_angle` must be positive, got 0"),
    "angle": (lambda: create("geonorm", learnable_angle=1), "`learnable_angle` of placement 'geonorm' must be"),
    "normalize": (lambda: create("geonorm", normalize_update="yes"), "`normalize_update` of placement 'geonorm'"),
    **{
        f"entry {name}": (
            lambda name=name: create(name, normalize_entry="no"),
            f"`normalize_entry` of placement '{name}' must be true or false, got 'no'",
        )
        for name in NAMES
        if name != "geonorm"
    },
    "parse name": (lambda: parse("geonom"), "unknown placement 'geonom'; did you mean 'geonorm'"),
    "parse nothing": (lambda: parse(""), "unknown placement ''"),
    "parse no value": (lambda: parse("geonorm:alpha"), "has no value; write it as alpha=VALUE"),
    "parse twice": (lambda: parse("geonorm:alpha=1,alpha=2"), "option 'alpha' of placement 'geonorm' is given twice"),
    "parse none": (lambda: parse("geonorm:alpha=none"), "`alpha` must be a positive number, got 'none'"),
    "parse nan": (lambda: parse("geonorm:alpha=nan"), "`alpha` must be positive, got nan"),
    "layer 0": (lambda: Site(0, "mlp", 4), "`layer` must be a whole number of at least 1, got 0"),
    "layer 5": (lambda: Site(5, "mlp", 4), r"`layer` must lie in 1\.\.4, got 5"),
    "layer 1.5": (lambda: Site(1.5, "mlp", 4), "`layer` must be a whole number of at least 1, got 1.5"),
    "sublayer": (lambda: Site(1, "ffn", 4), r"unknown sub-layer 'ffn' \(known: attention, mlp\)"),
    "depth": (lambda: Wiring("pre", 8, 0), "`num_layers` must be a whole number of at least 1, got 0"),
    "width": (lambda: Wiring("pre", 8.0, 2), "`dim` must be a whole number of at least 1, got 8.0"),
    "role": (lambda: Wiring("pre", 8, 2).init_(torch.empty(8, 8), "vale"), "unknown role 'vale'; did you mean 'value'"),
    "xavier": (lambda: Wiring("deepnorm", 8, 2).init_(torch.empty(8), "value"), r"shape \[out, in\], got \(8,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(MISTAKES))
def test_mistakes_are_named(case):
    call, message = MISTAKES[case]
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_mixture_knows_the_point_within_a_parallel_layer_wherever_that_stands():
    x, pending = torch.randn(2, 3, 8)
    for options in ({"first": "post", "rest": "parallel"}, {"first": "parallel", "rest": "post"}):
        mixture = create("mix", **options)
        assert torch.equal(mixture.point((x, pending)), x + pending)
        assert mixture.point(x) is x
