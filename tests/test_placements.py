"""Every placement against its published formula; a guard that none is without a row in the table."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import types
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from geonorm import geometry, placements
from geonorm.placements import Placement, Wiring, create, unit_rms
from placement_formulas import rate, rms, split, unit
from placement_table import NAMES, TABLE, Recorder, every_placement, parameters_of, wired
from tolerances import EPS, SAME_64, step_bound, worst

INFRASTRUCTURE = {"base", "connection", "norm_kinds", "registry", "wiring"}


def unregistered(modules: Iterable[types.ModuleType], registered: Iterable[type]) -> list[str]:
    """Placements that a module defines and the registry lacks, and modules that define none."""
    faults = []
    for module in modules:
        defined = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Placement) and value.__module__ == module.__name__
        ]
        faults += [f"{module.__name__} defines no placement"] if not defined else []
        faults += [f"{kind.__name__} is not registered" for kind in defined if kind not in list(registered)]
    return faults


def placement_modules() -> list[types.ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(placements.__path__) if info.name not in INFRASTRUCTURE]
    return [importlib.import_module(f"geonorm.placements.{name}") for name in names]


def test_every_placement_has_a_row_in_this_table_and_in_the_registry():
    assert set(NAMES) == set(TABLE), "a placement needs a row in TABLE: its formula, written independently"
    assert unregistered(placement_modules(), placements.REGISTRY.values()) == []
    assert len(placement_modules()) == len(NAMES)
    assert all(kind.name == name for name, kind in placements.REGISTRY.items())


def test_the_guard_sees_what_is_missing():
    forgotten = types.ModuleType("geonorm.placements.forgotten")
    assert unregistered([forgotten], placements.REGISTRY.values()) == [
        "geonorm.placements.forgotten defines no placement"
    ]
    kind = type("Forgotten", (Placement,), {"__module__": forgotten.__name__, "name": "forgotten"})
    forgotten.Forgotten = dataclasses.dataclass(frozen=True)(kind)
    assert unregistered([forgotten], placements.REGISTRY.values()) == ["Forgotten is not registered"]


ON_A_SPHERE = ("geonorm", "spheret", "slerp")

# --- the formulas ---------------------------------------------------------------------------------------------------


def moved(connection, by=0.3):
    """Every parameter of the connection's own off its start, so that none can hide."""
    with torch.no_grad():
        for parameter in connection.connection.parameters():
            parameter.mul_(1 + by * torch.randn_like(parameter)).add_(by * torch.randn_like(parameter))
    return connection


@every_placement
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_update_formula(name, dtype):
    dim, row = 48, TABLE[name]
    slots = ("input", "output", "stream", "second")
    gains = {slot: (1 + 0.3 * torch.randn(dim)).to(dtype) for slot in slots}
    connection = moved(wired(name, dim, dtype, gains))
    x, sublayer = unit_rms(torch.randn(4, 9, dim)).to(dtype), Recorder(torch.randn(4, 9, dim).to(dtype))
    if name == "ngpt":
        x = geometry.norm(x.double()).reciprocal().to(dtype) * x
    stream = row.distinct(x)
    with torch.no_grad():
        y = connection(stream, sublayer)
    p, wide = parameters_of(connection), widened(stream)
    # bfloat16 rounds between the operations of the composed placements: a few roundings of the largest entry.
    bound = 4 * EPS[dtype] if dtype == torch.bfloat16 else step_bound(dtype, dim)
    assert worst(sublayer.read, row.reads(wide, p)) <= bound
    exact = row.update(wide, sublayer.output.double(), p)
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    if name in ON_A_SPHERE:
        # The connection names the radius; bfloat16 rows are not exactly on it.
        exact = exact * math.sqrt(dim) / exact.norm(dim=-1, keepdim=True)
    assert worst(y, exact) <= bound


def widened(stream):
    return tuple(part.double() for part in stream) if isinstance(stream, tuple) else stream.double()


def test_pre_norm_is_the_stock_wiring_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        connection = wired("pre", 32, dtype, {"input": torch.rand(32)})
        x, layer = torch.randn(3, 5, 32, dtype=dtype), nn.Linear(32, 32).to(dtype)
        assert torch.equal(connection(x, layer), x + layer(connection.norms["input"](x)))
        assert create("pre").enter(x) is x


def test_parallel_sub_layers_read_the_same_rows_and_the_point_is_their_sum():
    placement, wiring = create("parallel"), Wiring("parallel", 16, 2).double()
    x, attention, mlp = torch.randn(3, 16).double(), Recorder(torch.randn(3, 16).double()), nn.Linear(16, 16).double()
    between = wiring.connections[2](x, attention)
    assert torch.equal(placement.point(x), x)
    assert torch.equal(placement.point(between), x + attention.output)
    after = wiring.connections[3](between, mlp)
    assert worst(attention.read, rms(x)) <= SAME_64
    assert worst(after, x + attention.output + mlp(rms(x))) <= SAME_64
    assert placement.point(after) is after


@every_placement
def test_the_plane_view(name):
    dim, row = 24, TABLE[name]
    connection = wired(name, dim, torch.float64)
    # Small and large updates; geonorm's largest angle stays below pi, where the angle of two points ends.
    x = unit_rms(torch.randn(200, dim, dtype=torch.float64)) * (row.entry or (lambda dim: 1.0))(dim)
    u = torch.randn(200, dim, dtype=torch.float64) * torch.logspace(-1, 0.6, 200)[:, None]
    y = create(name).point(connection(row.between(x), Recorder(u)))
    basis = torch.linalg.qr(torch.stack([x, row.plane(u)], -1)).Q
    outside = y - (basis @ (basis.mT @ y.unsqueeze(-1))).squeeze(-1)
    assert worst(outside, torch.zeros_like(y)) <= SAME_64
    angle = geometry.angle(x, y)
    assert worst(angle, row.angle(x, u, parameters_of(connection))) <= SAME_64
    if name == "geonorm":
        assert angle.max() > math.pi / 4
    if name in (*ON_A_SPHERE, "ngpt"):
        assert worst(y.norm(dim=-1), x.norm(dim=-1)) <= SAME_64


@every_placement
def test_the_point_of_a_stream(name):
    row, placement = TABLE[name], create(name)
    x = torch.randn(5, 16, dtype=torch.float64)
    assert placement.single_stream == (row.rows(x) is x)
    if placement.single_stream:
        assert placement.point(x) is x
    else:
        stream = row.distinct(x)
        assert worst(placement.point(stream), row.point(stream)) <= SAME_64


@pytest.mark.parametrize("retraction", ["exponential", "projection", "cayley", 3.0])
def test_the_angle_of_geonorm_is_phi(retraction):
    connection = wired("geonorm", 16, torch.float64, retraction=retraction, max_angle=None, decay="sqrt", alpha=0.5)
    x, u = unit_rms(torch.randn(50, 16, dtype=torch.float64)), torch.randn(50, 16, dtype=torch.float64)
    r, across, _ = split(x, u)
    t = 0.5 / math.sqrt(2) * across / r
    phi = {"exponential": t, "projection": t.atan(), "cayley": 2 * (t / 2).atan(), 3.0: 3 * (t / 3).atan()}
    assert worst(geometry.angle(x, connection(x, Recorder(u))), phi[retraction]) <= SAME_64


# --- entry and exit -------------------------------------------------------------------------------------------------


@every_placement
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("std", [1e-30, 0.02, 1e4])
def test_entry(name, dtype, std):
    h = (torch.randn(5, 7, 64, dtype=torch.float64) * std).to(dtype)
    h[0, 0] = 0
    row, placement = TABLE[name], create(name)

    def entered(placement):
        stream = placement.open(h)
        point = placement.point_of(stream)
        assert stream.dtype == dtype
        assert torch.equal(stream, row.rows(point))
        return point

    point, rms_wanted = entered(placement), row.entry
    assert not point[0, 0].any()
    if rms_wanted is None:
        assert torch.equal(point, h)
        if "normalize_entry" not in placement.options():
            return
        point, rms_wanted = entered(create(name, normalize_entry=True)), lambda dim: 1.0
    size = point.double().square().mean(-1).sqrt().flatten()[1:] / rms_wanted(64)
    assert worst(size, torch.ones_like(size)) <= (1 if dtype == torch.bfloat16 else 4) * EPS[dtype]
    assert worst(geometry.angle(point.double(), h.double()), torch.zeros(5, 7)) <= EPS[dtype] + SAME_64
    if "normalize_entry" in placement.options():
        assert torch.equal(entered(create(name, normalize_entry=False)), h)


@pytest.mark.parametrize("value", [1e-40, 1e-30, 1e30, 3e38])
def test_entry_of_extreme_rows_and_its_gradient(value):
    h = torch.full((2, 4), value)
    h[0] = 0
    h.requires_grad_()
    out = unit_rms(h)
    assert worst(out.detach()[1], torch.ones(4)) <= 4 * EPS[torch.float32]
    (gradient,) = torch.autograd.grad(out.sum(), h)
    # A zero row, such as an embedding that was never drawn, can leave zero: it passes its gradient on.
    assert not bool(gradient.isnan().any())
    assert worst(gradient[0], 2 * torch.ones(4)) <= 4 * EPS[torch.float32]


def test_gradient_of_the_entry():
    assert torch.autograd.gradcheck(unit_rms, torch.randn(3, 5, dtype=torch.float64, requires_grad=True))


@every_placement
def test_exit_has_the_final_norm_only_where_published(name):
    row, wiring = TABLE[name], Wiring(name, 16, 2)
    assert isinstance(wiring.final_norm, nn.RMSNorm) == row.final_norm == create(name).final_norm
    h = torch.randn(3, 16)
    if create(name).single_stream:
        assert torch.equal(wiring.exit(h), wiring.final_norm(h))


def exit_parameters(wiring):
    with torch.no_grad():
        for norm in wiring.exit_norms.values():
            norm.weight.mul_(1 + 0.3 * torch.randn_like(norm.weight))
        for parameter in () if wiring.exit_module is None else wiring.exit_module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    own = {} if wiring.exit_module is None else dict(wiring.exit_module.named_parameters())
    return {**own, **{slot: norm.weight for slot, norm in wiring.exit_norms.items()}}


@every_placement
def test_exit_formula(name):
    row, wiring = TABLE[name], Wiring(name, 16, 2).double()
    p, h = exit_parameters(wiring), torch.randn(5, 16, dtype=torch.float64)
    stream = row.distinct(h) if row.rows(h) is not h else h
    expected = row.exit(stream, p)
    assert worst(wiring.exit(stream), rms(expected) if row.final_norm else expected) <= SAME_64


# --- sub-layers that return nothing ---------------------------------------------------------------------------------


@every_placement
@pytest.mark.parametrize("learnt", [False, True])
def test_what_happens_to_a_stream_without_updates(name, learnt):
    """Through three layers and the exit, with parameters at their start and anywhere else."""
    torch.manual_seed(0)
    row, wiring = TABLE[name], Wiring(name, 16, 3).double()
    if learnt:
        for connection in wiring.connections:
            moved(connection)
    p = exit_parameters(wiring)
    x = torch.randn(5, 16, dtype=torch.float64)
    if row.entry is not None:
        x = unit_rms(x) * row.entry(16)
    stream = wiring.enter(x)
    for connection in wiring.connections:
        stream = connection(stream, torch.zeros_like)
    expected = row.still(row.rows(x))
    if name == "ngpt":
        # The chord to nothing: shorter by a part of each channel, which turns the row once the parts differ.
        for connection in wiring.connections:
            expected = unit(expected * (1 - rate(parameters_of(connection))))
    assert worst(stream, expected) <= SAME_64 + row.slack
    expected = row.exit(expected, p)
    assert worst(wiring.exit(stream), rms(expected) if row.final_norm else expected) <= SAME_64 + 2 * row.slack


def test_mixed_streams_keep_their_sum_and_stay_apart_without_updates():
    wiring = Wiring("mhc", 16, 3).double()
    stream = TABLE["mhc"].distinct(torch.randn(5, 16, dtype=torch.float64))
    first = stream
    for connection in wiring.connections:
        stream = connection(stream, torch.zeros_like)
    # Rows sum to 1 once Sinkhorn has converged, which it has near the identity.
    assert worst(stream.sum(-2), first.sum(-2)) <= 1e-4
    # Each keeps 1/(1 + 3 exp(-8)) of itself a sub-layer at first.
    assert worst(stream, first) <= 6 * 2 * 3 * math.exp(-8) * 1.5
    assert worst(stream, first) > 3 * math.exp(-8)
