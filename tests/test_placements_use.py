"""Options and names of placements, and what users get wrong."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import json

import numpy as np
import pytest
import torch

from geonorm import UserError
from geonorm.placements import Site, Wiring, create, parse, set_training_step
from placement_table import NAMES, SITE, every_placement

# --- options and names ----------------------------------------------------------------------------------------------


@every_placement
def test_options_round_trip(name):
    default = create(name)
    assert create(name, **default.options()) == default == create(default)
    assert default.changed_options() == {}
    assert default.label() == name
    assert repr(create(name).connect(dataclasses.replace(SITE, dim=8)))
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
    if isinstance(value, int):
        return [np.int64(value), np.uint8(value), np.array(value), torch.tensor(value)]
    if isinstance(value, str):
        return [np.str_(value), np.array(value)]
    if isinstance(value, list) and isinstance(value[0], str):
        return [tuple(value), np.array(value), [np.str_(item) for item in value]]
    if isinstance(value, list):
        return [tuple(value), np.array(value), torch.tensor(value), [np.float32(item) for item in value]]
    return [value]


# Values that every type above holds exactly.
CHANGED = {"alpha": 0.5, "decay": "sqrt", "per": "sublayer", "retraction": "cayley", "max_angle": 0.75, "rate": 0.125}
CHANGED |= {"warm_depth": 7, "norm": "dyt"}


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
    if "layers" in tried:
        tried["layers"] = ["sandwich", "lns"]
    if name == "ngpt":
        del tried["norm"]
    if not create(name).single_stream:
        del tried["entry_skip"]
    for option, value in tried.items():
        for other in other_values(not value if isinstance(value, bool) else value):
            expected = not value if isinstance(value, bool) else value
            found = doors[door]({option: other}).options()[option]
            assert found == expected, (option, other)
            assert type(found) is type(expected), (option, other)
            assert isinstance(json.dumps(found), str)
            assert not isinstance(found, list) or {type(item) for item in found} == {type(value[0])}


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
        if "normalize_entry" in create(name).options()
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


MIXED = "a mixture takes placements"
MISTAKES |= {
    "gain": (lambda: create("pre", gain="chanel"), "unknown gain 'chanel'; did you mean 'channel'"),
    "gain list": (lambda: create("pre", gain=["scalar"]), "unknown gain"),
    "gain of an angle": (lambda: create("slerp", gain="channel"), "multiplies an angle, one a row: take gain=scalar"),
    "gain start": (lambda: create("pre", gain="scalar", gain_start="a"), "`gain_start` must be a finite number, got"),
    "gain start none": (lambda: create("pre", gain="scalar", gain_start=None), "finite number, got None"),
    "gain start nan": (lambda: create("pre", gain="scalar", gain_start=np.nan), "finite number, got nan"),
    "gain start huge": (lambda: create("pre", gain="scalar", gain_start=10**400), "finite number, got 1000"),
    "start without a gain": (lambda: create("pre", gain_start=0), "start of a gain, and `gain` is none; give gain="),
    "warm depth": (lambda: create("pre", warm_depth=0), "`warm_depth` must be a whole number of at least 1, got 0"),
    "warm depth half": (lambda: parse("pre:warm_depth=2.5"), "`warm_depth` must be a whole number .*, got 2.5"),
    "entry skip": (lambda: create("pre", entry_skip=1), "`entry_skip` of placement 'pre' must be true or false, got 1"),
    **{
        f"entry skip {name}": (
            lambda name=name: create(name, entry_skip=True),
            f"`entry_skip` needs a stream of one row a token, and placement '{name}' has several",
        )
        for name in NAMES
        if not create(name).single_stream
    },
    "norm": (lambda: create("pre", norm="rms"), "unknown norm 'rms'; did you mean 'rmsnorm'"),
    "norm list": (lambda: create("pre", norm=["dyt"]), "unknown norm"),
    "norm of a wiring": (lambda: Wiring("pre", 8, 2, norm="rms"), "unknown norm 'rms'; did you mean 'rmsnorm'"),
    "norm of none": (lambda: create("ngpt", norm="dyt"), "placement 'ngpt' has none; leave it out"),
    "training step": (
        lambda: set_training_step(Wiring("pre", 8, 2, warm_depth=3), -1),
        "`step` must be a whole number of at least 0, got -1",
    ),
    "streams": (lambda: create("hyper", streams=1), "`streams` must be at least 2, got 1; .*use placement 'pre'"),
    "streams half": (lambda: parse("mhc:streams=2.5"), "`streams` must be a whole number of at least 1, got 2.5"),
    "iterations": (lambda: create("mhc", iterations=0), "`iterations` must be a whole number of at least 1, got 0"),
    "block size": (lambda: create("attnres", block_size=0), "`block_size` must be a whole number .*, got 0"),
    "rate": (lambda: create("ngpt", rate=0), "`rate` must be positive, got 0"),
    "gates": (lambda: create("nag", gates=0), "`gates` must be a whole number of at least 1, got 0"),
    "beta": (lambda: create("nag", beta=-1), "`beta` must be positive, got -1"),
    "dual scale": (lambda: create("resi_dual", dual_scale=0), "`dual_scale` must be positive, got 0"),
    "exit scale": (lambda: create("resi_dual", exit_scale="x"), "`exit_scale` must be a positive number"),
    "part": (lambda: create("slerp", alpha=2), "`alpha` is a part of the way and must be at most 1, got 2"),
    "part per": (lambda: create("slerp", per="block"), "`per` must be 'layer' or 'sublayer', got 'block'"),
    "first pre": (lambda: create("hybrid", first_pre=1), "`first_pre` of placement 'hybrid' must be true"),
    "share": (lambda: create("mix", share=1.5), r"`share` must lie in 0\.\.1, got 1.5"),
    "share text": (lambda: create("mix", share="a"), r"`share` must lie in 0\.\.1, got a"),
    "share flag": (lambda: create("mix", share=True), r"`share` must lie in 0\.\.1, got True"),
    "mix first": (lambda: create("mix", first=3), f"{MIXED} as the command line writes them, such as 'pre', got 3"),
    "mix unknown": (lambda: create("mix", rest="prenorm"), "unknown placement 'prenorm'"),
    "mix of mixtures": (lambda: create("mix", first="mix"), f"{MIXED} with one row .*'mix' does not fit"),
    **{
        f"mix of {name}": (lambda name=name: create("mix", rest=name), f"{MIXED} with one row .*'{name}' does not fit")
        for name in ("resi_dual", "siamese", "hyper", "mhc", "attnres", "ngpt", "hybrid")
    },
    "mix of options": (lambda: create("mix", rest="nag:gain=scalar"), "give `gain` to the mixture, not to 'nag' in it"),
    "mix layers": (lambda: create("mix", layers=[1, 2]), f"{MIXED} as the command line writes them"),
    "mix no layers": (lambda: create("mix", layers=[]), "`layers` must be a list of placements, one a layer"),
    "mix text": (lambda: create("mix", layers="pre"), "`layers` must be a list of placements, .*got 'pre'"),
    "mix both": (lambda: create("mix", layers=["pre"], share=0.5), "`layers` gives .*; leave `share` out"),
    "mix depth": (lambda: Wiring("mix", 8, 3, layers=["pre"]), "`layers` names 1 placements, but .* has 3"),
    "mix role": (lambda: Wiring("mix", 8, 3).init_(torch.empty(8, 8), "value"), "for which layer 'value' is drawn"),
    "mix layer": (lambda: Wiring("mix", 8, 3).init_(torch.empty(8, 8), "value", 4), r"`layer` must lie in 1\.\.3"),
    "no width": (lambda: create("hyper").connect(Site(1, "mlp", 2)), r"give the width: Site\(\.\.\., dim=768\)"),
    "place": (lambda: Wiring("ngpt", 8, 3).inside("querry", 8, 8), "unknown place 'querry'; did you mean 'query'"),
    "head": (lambda: Wiring("hybrid", 8, 3).inside("key", 8), "`head_dim` must be a whole number of at least 1, got 0"),
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
