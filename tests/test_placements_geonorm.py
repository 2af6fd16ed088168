"""The options of geonorm: step sizes, learnable alpha, normalised updates."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from geonorm import UserError, geometry
from geonorm.placements import Wiring, create, unit_rms
from geonorm.schedules import step_sizes
from placement_table import Recorder, wired
from tolerances import EPS, SAME_64

# --- step sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["harmonic", "sqrt", "linear", "none"])
def test_layers_share_a_step_or_sublayers_count_apart(decay):
    for per in ("layer", "sublayer"):
        wiring = Wiring("geonorm", 8, 5, decay=decay, per=per, alpha=2.0)
        got = [connection.connection.alpha for connection in wiring.connections]
        if per == "layer":
            want = [size for size in step_sizes(decay, 2.0, 5) for _ in range(2)]
        else:
            want = step_sizes(decay, 2.0, 10)
        assert got == want


def test_step_sizes_can_be_given_one_by_one():
    sizes = [8.0, 0.5, 1e-3, 2, 0.25, 0.125]
    wiring = Wiring("geonorm", 8, 3, alphas=sizes, max_angle=None)
    assert [connection.connection.alpha for connection in wiring.connections] == sizes
    x = unit_rms(torch.randn(4, 8, dtype=torch.float64))
    u = torch.randn(4, 8, dtype=torch.float64)
    for connection, size in zip(wiring.connections, sizes, strict=True):
        want = size * geometry.norm(geometry.tangent(x, u)) / geometry.norm(x)
        got = geometry.angle(x, connection(x, Recorder(0.01 * u)))
        torch.testing.assert_close(got, 0.01 * want.squeeze(-1))
    learnable = Wiring("geonorm", 8, 3, alphas=sizes, learnable=True)
    got = [float(connection.connection.alpha.detach()) for connection in learnable.connections]
    assert got == pytest.approx(sizes, rel=1e-5)


def test_given_step_sizes_survive_json_and_are_short_in_tables():
    placement = create("geonorm", alphas=(1.0, 0.5))
    options = json.loads(json.dumps(placement.options()))
    assert options == placement.options()
    assert options["alphas"] == [1.0, 0.5]
    assert create("geonorm", **options) == placement
    assert hash(placement) == hash(create("geonorm", **options))
    assert create(placement, max_angle=None).alphas == (1.0, 0.5)
    assert placement.label() == "geonorm(alphas=[2])"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"alphas": [1.0, 1.0, 1.0]}, "`alphas` must be a list of step sizes, two a layer"),
        ({"alphas": []}, "`alphas` must be a list"),
        ({"alphas": 0.5}, "`alphas` must be a list"),
        ({"alphas": "ab"}, "`alphas` must be a list"),
        ({"alphas": [1.0, 0.0]}, r"`alphas\[1\]` must be positive, got 0"),
        ({"alphas": [1.0, "1"]}, r"`alphas\[1\]` must be a positive number"),
        ({"alphas": [1.0, math.nan]}, r"`alphas\[1\]` must be positive"),
        ({"alphas": [1.0, 1.0], "alpha": 2.0}, "`alphas` gives every step size itself; leave `alpha` out"),
        ({"alphas": [1.0, 1.0], "decay": "sqrt"}, "leave `decay` out"),
        ({"alphas": [1.0, 1.0], "per": "sublayer"}, "leave `per` out"),
    ],
)
def test_step_sizes_that_cannot_be(options, pattern):
    with pytest.raises(UserError, match=pattern):
        create("geonorm", **options)


def test_step_sizes_for_another_depth():
    with pytest.raises(UserError, match="`alphas` has 4 step sizes, but 3 layers take 6, two a layer"):
        Wiring("geonorm", 8, 3, alphas=[1.0] * 4)


def test_learnable_alpha_starts_where_it_should_and_learns():
    for alpha in (1e-4, 0.3, 1.0, 40.0):
        wiring = Wiring("geonorm", 8, 3, alpha=alpha, learnable=True)
        fixed = Wiring("geonorm", 8, 3, alpha=alpha)
        for one, other in zip(wiring.connections, fixed.connections, strict=True):
            assert one.connection.raw_alpha.shape == (1,)
            assert float(one.connection.alpha.detach()) == pytest.approx(other.connection.alpha, rel=1e-5)
    connection = wired("geonorm", 8, torch.float64, learnable=True, max_angle=None)
    x, u, g = (torch.randn(6, 8, dtype=torch.float64) for _ in range(3))
    x = unit_rms(x)
    raw = connection.connection.raw_alpha
    (connection(x, Recorder(u)) * g).sum().backward()
    with torch.no_grad():
        values = []
        for shift in (1e-6, -1e-6):
            raw += shift
            values.append(float((connection(x, Recorder(u)) * g).sum()))
            raw -= shift
    assert float(raw.grad) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)
    assert [name for name, _ in wired("geonorm", 8, torch.float32).named_parameters()] == []


def test_learnable_alpha_survives_saving_copying_and_reset():
    wiring = Wiring("geonorm", 8, 2, learnable=True)
    for parameter in wiring.parameters():
        nn.init.constant_(parameter, 0.123)
    other = Wiring("geonorm", 8, 2, learnable=True)
    other.load_state_dict(wiring.state_dict())
    x, u = torch.randn(3, 8), Recorder(torch.randn(3, 8))
    for twin in (other, copy.deepcopy(wiring)):
        assert torch.equal(twin.connections[1](x, u), wiring.connections[1](x, u))
    raw = wiring.connections[2].connection
    raw.reset_parameters()
    assert float(raw.alpha.detach()) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("learned", [(1.0, 0.0), (0.7, 0.2), (0.5, -0.3)])
@pytest.mark.parametrize("max_angle", [None, math.pi / 4])
def test_limit_scale_and_shift_before_the_decay(max_angle, learned):
    """``theta = min(alpha (scale min(t, limit) + shift), max_angle)`` along the tangent part of u."""
    scale, shift = learned
    limits = {"max_update_angle": math.pi / 4, "max_angle": max_angle}
    connection = wired("geonorm", 16, torch.float64, alpha=1.5, decay="none", learnable_angle=True, **limits)
    start = dict(connection.connection.named_parameters())
    assert {name: value.tolist() for name, value in start.items()} == {"angle_scale": [1.0], "angle_shift": [0.0]}
    with torch.no_grad():
        connection.connection.angle_scale.fill_(scale)
        connection.connection.angle_shift.fill_(shift)
    x = unit_rms(torch.randn(60, 16, dtype=torch.float64))
    u = torch.randn(60, 16, dtype=torch.float64) * torch.logspace(-3, 2, 60, dtype=torch.float64)[:, None]
    v = u - (u * x).sum(-1, keepdim=True) / 16 * x
    length = v.norm(dim=-1, keepdim=True)
    t = length / 4
    # A shift fades out where there is next to nothing to be shifted.
    theta = 1.5 * (scale * t.clamp(max=math.pi / 4) + shift * t / (t.square() + 1e-8).sqrt())
    if max_angle is not None:
        theta = theta.clamp(-max_angle, max_angle)
    want = theta.cos() * x + theta.sin() * 4 * v / length
    torch.testing.assert_close(connection(x, Recorder(u)), want, rtol=0, atol=SAME_64)


@pytest.mark.parametrize("options", [{"max_update_angle": 0.3}, {"max_update_angle": 0.3, "learnable_angle": True}])
def test_derivatives_with_a_limit_before_the_decay(options):
    connection = wired("geonorm", 6, torch.float64, **options)
    x = unit_rms(torch.randn(5, 6, dtype=torch.float64)).requires_grad_()
    # Far below the limit, far above it, and no tangent part at all, where finite differences cannot follow a shift.
    sizes = torch.tensor([0.02, 0.1, 5.0, 30.0, 0.1 if "learnable_angle" in options else 0.0], dtype=torch.float64)
    u = torch.randn(5, 6, dtype=torch.float64) * sizes[:, None]
    parameters = tuple(connection.parameters())

    def step(x, u, *parameters):
        return connection(x, Recorder(u))

    inputs = (x, u.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(step, inputs)
    assert torch.autograd.gradgradcheck(step, inputs)
    still = connection(x, Recorder(u * 0))
    torch.testing.assert_close(still, x, rtol=0, atol=SAME_64)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(still.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_limit_before_the_decay_bounds_the_angle(dtype):
    connection = wired("geonorm", 32, dtype, alpha=0.5, decay="none", max_update_angle=0.4)
    x = unit_rms(torch.randn(100, 32)).to(dtype)
    u = (torch.randn(100, 32) * torch.logspace(-6, 6, 100)[:, None]).to(dtype)
    moved = geometry.angle(x.double(), connection(x, Recorder(u)).double())
    assert float(moved.max()) <= 0.2 + 4 * EPS[dtype]
    plain = wired("geonorm", 32, dtype, alpha=0.5, decay="none")
    # Rows below the limit: the plain step, its rounding apart.
    assert (connection(x, Recorder(u))[:40] - plain(x, Recorder(u))[:40]).abs().max() <= 4 * EPS[dtype]


@pytest.mark.parametrize("retraction", ["exponential", "projection", "cayley", 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_normalized_updates_bound_the_angle_by_phi_of_alpha(dtype, retraction):
    options = {"normalize_update": True, "max_angle": None, "alpha": 1.5, "decay": "sqrt", "retraction": retraction}
    connection = wired("geonorm", 32, dtype, **options)
    alpha = 1.5 / math.sqrt(2)
    p = geometry.retraction_exponent(retraction)
    phi = alpha if p == math.inf else p * math.atan(alpha / p)
    x = unit_rms(torch.randn(100, 32)).to(dtype)
    u = (torch.randn(100, 32) * torch.logspace(-6, 6, 100)[:, None]).to(dtype)
    angle = geometry.angle(x.double(), connection(x, Recorder(u)).double())
    assert float(angle.max()) <= phi * (1 + 4 * EPS[dtype])
    assert float(angle[u.double().square().mean(-1) > 1].min()) > 0.5 * phi
    # Smooth where the update vanishes or has no tangent part.
    leaf = torch.stack([torch.zeros(32), x[0].float(), -x[1].float()]).to(dtype).requires_grad_()
    connection(x[:3], Recorder(leaf)).sum().backward()
    assert bool(leaf.grad.isfinite().all())
