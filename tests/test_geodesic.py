"""The theorem: every placement is a walk on the sphere with the radius carried beside it, and gives the same logits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from exact_norms import make_exact
from family_models import FAMILIES, adapter_of, prompts, rewired_model, stock_model
from geonorm import UserError, geometry
from geonorm.inspection import geodesic_form, watched
from geonorm.inspection.geodesic import GeodesicConnection, Polar, norm_of_direction
from geonorm.models import blocks
from geonorm.placements import available
from geonorm.placements.pre import PreConnection
from tolerances import EPS, SAME_64

# float32: a hundred roundings of the largest logit, for two layers.
SAME_32 = 128 * EPS[torch.float32]
# Several rows a token, or a step whose size is not that of an addend.
NO_WALK = ["hybrid", "resi_dual", "siamese", "hyper", "mhc", "attnres", "ngpt", "slerp", "nag"]
OPTIONS = {
    "geonorm cayley learnable": ("geonorm", {"retraction": "cayley", "learnable": True, "max_angle": None}),
    "geonorm normalised p": ("geonorm", {"retraction": 3.0, "normalize_update": True, "alpha": 2.0}),
    "geonorm limit first": ("geonorm", {"max_update_angle": 0.2, "learnable_angle": True, "alpha": 2.0}),
    "geonorm wrapping": ("geonorm", {"alpha": 8.0, "max_angle": None, "decay": "none"}),
    "pre entry": ("pre", {"normalize_entry": True}),
    "pre gain": ("pre", {"gain": "channel"}),
    "keel gain": ("keel", {"gain": "scalar", "gain_start": 0.3}),
    "output stock entry": ("output", {"normalize_entry": False}),
}


def difference(one: nn.Module, other: nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        wanted, got = one(input_ids=ids).logits, other(input_ids=ids).logits
    return ((wanted - got).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_model_equals_its_geodesic_form(family, monkeypatch):
    single = stock_model(family)
    assert difference(single, geodesic_form(single), prompts(2, 9)) < SAME_32
    double = single.double()
    make_exact(monkeypatch, double, adapter_of(family).unit_gain)
    assert difference(double, geodesic_form(double), prompts(2, 9)) < SAME_64


@pytest.mark.parametrize("placement", [name for name in available() if name not in NO_WALK])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_rewired_model_equals_its_geodesic_form(family, placement, monkeypatch):
    model = rewired_model(family, placement).double()
    make_exact(monkeypatch, model, adapter_of(family).unit_gain)
    assert difference(model, geodesic_form(model), prompts(2, 9)) < SAME_64


@pytest.mark.parametrize("placement", NO_WALK)
def test_other_steps_are_refused(placement):
    with pytest.raises(UserError, match=r"the geodesic form of a .* is not known"):
        geodesic_form(rewired_model("llama", placement))


@pytest.mark.parametrize("options", [{"gain": "scalar"}, {"warm_depth": 10}, {"entry_skip": True}])
def test_options_around_a_step_on_the_sphere_are_refused(options):
    with pytest.raises(UserError, match=r"the geodesic form of a .* is not known"):
        geodesic_form(rewired_model("llama", "geonorm", options=options))


@pytest.mark.parametrize("variant", OPTIONS)
def test_options_of_a_placement_are_kept(variant, monkeypatch):
    placement, options = OPTIONS[variant]
    model = rewired_model("llama", placement, options=options).double()
    make_exact(monkeypatch, model)
    assert difference(model, geodesic_form(model), prompts(2, 9)) < SAME_64


@pytest.mark.parametrize("kind", ["pre", "layer norm"])
def test_a_large_eps_is_divided_by_the_squared_radius(kind, monkeypatch):
    model = rewired_model("llama" if kind == "pre" else "gpt2", "pre").double()
    make_exact(monkeypatch, model)
    plain = copy.deepcopy(model)
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(module, name):
                setattr(module, name, 0.5)
    assert difference(model, plain, prompts(2, 9)) > 1e-3
    assert difference(model, geodesic_form(model), prompts(2, 9)) < SAME_64


@pytest.mark.parametrize("placement", ["pre", "post", "geonorm", "parallel", "output"])
def test_angles_turned_are_the_angles_between_the_points(placement, monkeypatch):
    model = rewired_model("llama", placement).double()
    make_exact(monkeypatch, model)
    walk = geodesic_form(model)
    measured = {}

    def record(site, move):
        # A gain after the step turns the row once more, so Post-Norm's landing point is formed here without it.
        end = move.x + move.update if placement == "post" else move.y
        measured[site.layer, site.sublayer] = geometry.angle(move.x, end)

    with torch.no_grad():
        with watched(model, record):
            model(input_ids=prompts(1, 9))
        walk(input_ids=prompts(1, 9))
    for block in blocks(walk):
        for sublayer in ("attention", "mlp"):
            connection = block.get_submodule(f"{sublayer}_connection")
            assert isinstance(connection, GeodesicConnection)
            torch.testing.assert_close(connection.angle, measured[block.site.layer, sublayer], rtol=1e-9, atol=1e-9)


def test_no_sum_of_stream_and_update_is_formed(monkeypatch):
    """The walk still gives the right logits when the placements' own connections cannot run."""
    model = rewired_model("llama", "pre")
    walk = geodesic_form(model)
    ids = prompts(1, 5)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        monkeypatch.setattr("geonorm.placements.pre.PreConnection.forward", None)
        got = walk(input_ids=ids).logits
    assert (wanted - got).abs().max() < SAME_32 * wanted.abs().max()


def test_opposite_update_and_zero_rows():
    x = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    u = torch.tensor([[-6.0, -8.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    step = GeodesicConnection(PreConnection(), 1.0)
    moved = step(Polar.of(x), lambda h: u, {"input": nn.RMSNorm(3, eps=1e-6, dtype=torch.float64)})
    torch.testing.assert_close(moved.point(), x + u)
    assert step.angle[0] == pytest.approx(math.pi)


def test_norm_of_a_zero_stream_and_without_weights():
    zero = Polar.of(torch.zeros(1, 4))
    assert torch.equal(norm_of_direction(nn.RMSNorm(4, eps=1e-6), zero), torch.zeros(1, 4))
    x = torch.randn(5, 4, dtype=torch.float64)
    for norm in (nn.LayerNorm(4, elementwise_affine=False), nn.RMSNorm(4, elementwise_affine=False)):
        torch.testing.assert_close(norm_of_direction(norm, Polar.of(x)), norm(x), rtol=1e-12, atol=1e-12)


def test_the_model_itself_is_left_alone_and_its_weights_are_shared():
    model = stock_model("llama")
    kind, names = type(model), [name for name, _ in model.named_modules()]
    walk = geodesic_form(model)
    assert type(model) is kind
    assert [name for name, _ in model.named_modules()] == names
    assert walk.lm_head.weight is model.lm_head.weight
    assert not walk.training


def test_it_generates_with_a_cache_what_the_model_generates():
    model = stock_model("llama")
    ids = prompts(1, 5)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), geodesic_form(model).generate(ids, **settings))


def test_what_it_cannot_do_is_one_clear_line():
    with pytest.raises(UserError, match="float32 or float64"):
        geodesic_form(stock_model("llama").bfloat16())
    with pytest.raises(UserError, match="cannot rewire a Linear"):
        geodesic_form(nn.Linear(2, 2))
    with pytest.raises(UserError, match="a geodesic form cannot be saved; save the model that it was made from"):
        geodesic_form(stock_model("llama")).save_pretrained("nowhere")
    with pytest.raises(UserError, match="RMSNorm and LayerNorm, not Identity"):
        norm_of_direction(nn.Identity(), Polar.of(torch.ones(1, 2)))
