"""Options that every placement has: gain, warm-up by depth, skip from the entry, kind of norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from geonorm.placements import Wiring, create, set_training_step
from placement_formulas import rms
from placement_table import NAMES, TABLE, Recorder, every_placement, parameters_of, wired
from tolerances import SAME_64, worst

SINGLE = [name for name in NAMES if create(name).single_stream]
WITH_NORMS = [name for name in NAMES if name != "ngpt"]


def gains(name):
    """Kinds of gain that a placement takes; slerp adds an angle, which has no channels."""
    return ("scalar",) if name == "slerp" else ("scalar", "channel")


WIDTHS = [(name, options) for name in NAMES for options in (*({"gain": g} for g in gains(name)), {"warm_depth": 4})]


class Maps(nn.Module):
    """Six sub-layers of three layers, the same for every placement."""

    def __init__(self, dim=16):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(dim, dim, generator=generator, dtype=torch.float64) / dim**0.5 for _ in range(6)]

    def walked(self, wiring, h):
        """The stream after each sub-layer, and what the head reads."""
        stream, streams = wiring.enter(h), []
        for connection, weight in zip(wiring.connections, self.weights, strict=True):
            stream = connection(stream, lambda z, weight=weight: torch.tanh(z @ weight.to(z.dtype)))
            streams.append(stream)
        return [*streams, wiring.exit(stream)]


def built(name, **options):
    """A wiring of three layers whose own parameters, but for those of the options, are those of one seed."""
    torch.manual_seed(0)
    return Wiring(name, 16, 3, **options)


def rows(dim=16):
    return torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(2))


def same_bits(one, two):
    if isinstance(one, tuple):
        return all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    return torch.equal(one, two)


# --- gain and warm-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), WIDTHS)
def test_a_gain_of_one_and_a_warm_up_that_is_over_leave_every_bit(name, options):
    plain, other = built(name), built(name, **options)
    # Step 12 is the last of the third layer's warm-up.
    for step in (12, 1000):
        set_training_step(other, step)
        for one, two in zip(Maps().walked(plain, rows()), Maps().walked(other, rows()), strict=True):
            assert same_bits(one, two)
    named = {parameter for parameter, _ in other.named_parameters()} - {name for name, _ in plain.named_parameters()}
    gains = [parameter for parameter, _ in other.named_parameters() if parameter.endswith("branch.gain")]
    assert named == set(gains)
    assert len(gains) == (6 if "gain" in options else 0)
    width = {"scalar": 1, "channel": 16}.get(options.get("gain"))
    assert all(other.get_parameter(gain).tolist() == [1.0] * width for gain in gains)


@every_placement
@pytest.mark.parametrize("options", [{"gain": "scalar", "gain_start": 0.0}, {"warm_depth": 4}])
def test_a_gain_of_zero_and_the_step_before_a_warm_up_leave_the_stream_as_without_updates(name, options):
    x = rows().double()
    wiring = built(name, **options).double()
    still = built(name).double()
    stream = still.enter(x)
    for connection in still.connections:
        stream = connection(stream, torch.zeros_like)
    *_, last, out = Maps().walked(wiring, x)
    assert worst(last, stream) <= SAME_64
    assert worst(out, still.exit(stream)) <= SAME_64
    # At 0 a gain still learns.
    if "gain" in options:
        (out * torch.randn_like(out)).sum().backward()
        gradients = [p.grad for path, p in wiring.named_parameters() if path.endswith("branch.gain")]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert sum(bool(gradient.any()) for gradient in gradients) == 6


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in NAMES for kind in (*gains(name), "warm-up", "both")]
)
def test_the_addend_is_multiplied(name, kind):
    """Layer 2 of a warm-up of 10 steps a layer is at a quarter in step 5."""
    options = {"gain": {"warm-up": "none", "both": "scalar"}.get(kind, kind)}
    options |= {"warm_depth": 10} if kind in ("warm-up", "both") else {}
    dim, row = 24, TABLE[name]
    connection = wired(name, dim, torch.float64, **options)
    set_training_step(connection, 5)
    factor = torch.tensor(0.25 if "warm_depth" in options else 1.0, dtype=torch.float64)
    if options["gain"] != "none":
        gain = connection.connection.branch.gain
        with torch.no_grad():
            gain.add_(0.3 * torch.randn_like(gain))
        factor = factor * gain.detach()
    x = torch.randn(7, dim, dtype=torch.float64)
    if row.entry is not None:
        x = create(name).enter(x)
        x = row.point(x)
    stream, u = row.distinct(x), torch.randn(7, dim, dtype=torch.float64)
    weak_u, p = row.weak(u, {"input": 1.0, **parameters_of(connection)}, factor)
    assert worst(connection(stream, Recorder(u)), row.update(stream, weak_u, p)) <= SAME_64


def test_training_steps_reach_every_connection_and_are_saved():
    wiring = built("post", warm_depth=10)
    set_training_step(wiring, 7)
    other = built("post", warm_depth=10)
    other.load_state_dict(wiring.state_dict())
    steps = [connection.connection.branch.training_step.tolist() for connection in other.connections]
    assert steps == [[7]] * 6
    periods = [connection.connection.branch.period for connection in other.connections]
    assert periods == [10, 10, 20, 20, 30, 30]
    # Of models without a warm-up nothing is asked.
    set_training_step(built("post", gain="scalar"), 7)


# --- skip from the entry --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_a_skip_from_the_entry_leaves_every_bit_at_first(name):
    plain, other = built(name), built(name, entry_skip=True)
    x, placement = rows(), other.placement
    *streams, out = Maps().walked(plain, x)
    *skipped, same = Maps().walked(other, x)
    assert torch.equal(out, same)
    for one, two in zip(streams, skipped, strict=True):
        assert torch.equal(plain.placement.point_of(one), placement.point_of(two))
    entered = other.enter(x)
    assert torch.equal(placement.point_of(entered), entered[..., 1, :])
    # Layers are mixed, not sub-layers.
    added = [path for path, _ in other.named_parameters() if "stream_scale" in path or "entry_scale" in path]
    assert len(added) == 2 * 3
    starts = {path.rpartition(".")[2]: other.get_parameter(path).tolist() for path in added}
    assert starts == {"stream_scale": [1.0], "entry_scale": [0.0]}


@pytest.mark.parametrize("name", SINGLE)
def test_what_a_skip_from_the_entry_adds(name):
    x = rows().double()
    plain, other = built(name).double(), built(name, entry_skip=True).double()
    entry = stream = plain.enter(x)
    maps, mixes = Maps(), torch.randn(3, 2, dtype=torch.float64)
    for number, (connection, weight) in enumerate(zip(plain.connections, maps.weights, strict=True)):
        if number % 2 == 0:
            keep, add = mixes[number // 2]
            stream = keep * stream + add * entry
            with torch.no_grad():
                other.connections[number].connection.stream_scale.fill_(keep)
                other.connections[number].connection.entry_scale.fill_(add)
        stream = connection(stream, lambda z, weight=weight: torch.tanh(z @ weight))
    assert worst(maps.walked(other, x)[-1], plain.exit(stream)) <= SAME_64


# --- kinds of norm --------------------------------------------------------------------------------------------------

KINDS = {
    "rmsnorm": lambda x, norm: rms(x, norm.weight),
    "layernorm": lambda x, norm: functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-5),
    "dyt": lambda x, norm: norm.weight * torch.tanh(norm.alpha * x) + norm.bias,
}
STARTS = {
    "rmsnorm": {"weight": 1.0},
    "layernorm": {"weight": 1.0, "bias": 0.0},
    "dyt": {"alpha": 0.5, "weight": 1.0, "bias": 0.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_NORMS)
def test_every_norm_is_of_the_kind_asked_for(name, kind):
    wiring = Wiring(name, 16, 3, norm=kind)
    assert wiring.placement == create(name, norm=kind) == Wiring(create(name, norm=kind), 16, 3).placement
    norms = [norm for connection in wiring.connections for norm in connection.norms.values()]
    norms += [*wiring.exit_norms.values(), *([wiring.final_norm] if wiring.placement.final_norm else [])]
    if name == "hybrid":
        norms += [wiring.inside(place, 16, 8).norm for place in ("query", "key", "value")]
    assert norms
    plain = Wiring(name, 16, 3)
    assert len(norms) == 3 * (name == "hybrid") + sum(type(norm).__name__ == "RMSNorm" for norm in plain.modules())
    for norm in norms:
        assert {key: set(p.flatten().tolist()) for key, p in norm.named_parameters()} == {
            key: {start} for key, start in STARTS[kind].items()
        }
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        x = torch.randn(5, norm.weight.shape[0], dtype=torch.float64)
        assert worst(norm.double()(x), KINDS[kind](x, norm)) <= SAME_64
        norm.reset_parameters()
        assert all(set(p.flatten().tolist()) == {STARTS[kind][key]} for key, p in norm.named_parameters())


def test_a_norm_of_ones_own_goes_before_the_kind():
    wiring = Wiring("pre", 16, 2, norm=nn.LayerNorm)
    assert type(wiring.final_norm) is nn.LayerNorm
    assert wiring.placement.norm is None


@every_placement
def test_all_options_at_once(name):
    options = {"gain": gains(name)[-1], "gain_start": 0.5, "warm_depth": 2}
    options |= {"entry_skip": True} if name in SINGLE else {}
    options |= {"norm": "dyt"} if name in WITH_NORMS else {}
    placement = create(name, **options)
    assert {key: placement.options()[key] for key in options} == options
    assert placement.changed_options() == options
    wiring = Wiring(placement, 16, 3)
    set_training_step(wiring, 3)
    out = Maps().walked(wiring, rows())[-1]
    (out * rows()).sum().backward()
    for path, parameter in wiring.named_parameters():
        assert parameter.grad is not None, path
        assert bool(parameter.grad.isfinite().all()), path


def test_options_by_their_names_on_the_command_line():
    from geonorm.placements import parse

    placement = parse("pre:gain=channel,gain_start=1e-4,warm_depth=1000,entry_skip=true,norm=dyt")
    assert placement == create("pre", gain="channel", gain_start=1e-4, warm_depth=1000, entry_skip=True, norm="dyt")
    assert type(placement.warm_depth) is int
    assert parse("pre:norm=none,warm_depth=none,gain=none") == create("pre")
    for text, options in {"hyper:streams=2": {"streams": 2}, "mhc:iterations=3": {"iterations": 3}}.items():
        assert parse(text).changed_options() == options
    assert parse("attnres:block_size=4").block_size == 4
    assert parse("nag:gates=2,beta=2").label() == "nag(gates=2, beta=2.0)"
