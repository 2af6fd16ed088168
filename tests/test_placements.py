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
from placement_table import NAMES, OUTSIDE, TABLE, Recorder, every_placement, rms, split, wired
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
    assert len(placement_modules()) == len(NAMES) + len(OUTSIDE)
    assert all(kind.name == name for name, kind in placements.REGISTRY.items())


def test_the_guard_sees_what_is_missing():
    forgotten = types.ModuleType("geonorm.placements.forgotten")
    assert unregistered([forgotten], placements.REGISTRY.values()) == [
        "geonorm.placements.forgotten defines no placement"
    ]
    kind = type("Forgotten", (Placement,), {"__module__": forgotten.__name__, "name": "forgotten"})
    forgotten.Forgotten = dataclasses.dataclass(frozen=True)(kind)
    assert unregistered([forgotten], placements.REGISTRY.values()) == ["Forgotten is not registered"]


# --- the formulas ---------------------------------------------------------------------------------------------------


@every_placement
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_update_formula(name, dtype):
    dim = 48
    gains = {slot: (1 + 0.3 * torch.randn(dim)).to(dtype) for slot in ("input", "output", "stream")}
    connection = wired(name, dim, dtype, gains)
    x, sublayer = unit_rms(torch.randn(4, 9, dim)).to(dtype), Recorder(torch.randn(4, 9, dim).to(dtype))
    with torch.no_grad():
        y = connection(TABLE[name].stream(x), sublayer)
    wide = {slot: gain.double() for slot, gain in gains.items()}
    assert (y.dtype, y.shape) == (dtype, x.shape)
    # bfloat16 rounds between the operations of the composed placements: a few roundings of the largest entry.
    bound = 4 * EPS[dtype] if dtype == torch.bfloat16 else step_bound(dtype, dim)
    assert worst(sublayer.read, TABLE[name].reads(x.double(), wide)) <= bound
    exact = TABLE[name].update(x.double(), sublayer.output.double(), wide)
    if name == "geonorm":
        # The connection names the radius; bfloat16 rows are not exactly on it.
        exact = exact * math.sqrt(dim) / exact.norm(dim=-1, keepdim=True)
    assert worst(y, exact) <= bound


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
    dim = 24
    connection = wired(name, dim, torch.float64)
    # Small and large updates; geonorm's largest angle stays below pi, where the angle of two points ends.
    x = unit_rms(torch.randn(200, dim, dtype=torch.float64))
    u = torch.randn(200, dim, dtype=torch.float64) * torch.logspace(-1, 0.6, 200)[:, None]
    y = connection(TABLE[name].stream(x), Recorder(u))
    basis = torch.linalg.qr(torch.stack([x, u], -1)).Q
    outside = y - (basis @ (basis.mT @ y.unsqueeze(-1))).squeeze(-1)
    assert worst(outside, torch.zeros_like(y)) <= SAME_64
    angle = geometry.angle(x, y)
    assert worst(angle, TABLE[name].angle(x, u)) <= SAME_64
    if name == "geonorm":
        assert angle.max() > math.pi / 4
        assert worst(y.norm(dim=-1), x.norm(dim=-1)) <= SAME_64


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
    stream = create(name).enter(h)
    assert stream.dtype == dtype
    assert not stream[0, 0].any()
    if not TABLE[name].unit_entry:
        assert torch.equal(stream, h)
        stream = create(name, normalize_entry=True).enter(h)
    size = stream.double().square().mean(-1).sqrt().flatten()[1:]
    assert worst(size, torch.ones_like(size)) <= (1 if dtype == torch.bfloat16 else 4) * EPS[dtype]
    assert worst(geometry.angle(stream.double(), h.double()), torch.zeros(5, 7)) <= EPS[dtype] + SAME_64
    if "normalize_entry" in create(name).options():
        assert torch.equal(create(name, normalize_entry=False).enter(h), h)


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
    wiring = Wiring(name, 16, 2)
    assert isinstance(wiring.final_norm, nn.RMSNorm) == TABLE[name].final_norm == create(name).final_norm
    h = torch.randn(3, 16)
    assert torch.equal(wiring.exit(h), wiring.final_norm(h))
