"""The weights of a new model: drawn by the rule of its placement, the same for every placement up to scale."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from geonorm import UserError
from geonorm.models import blocks, init_report, init_weights, rewire
from geonorm.models.families import GeonormLlamaConfig
from geonorm.placements import available, base_std, create
from geonorm.placements.base import WEIGHT_ROLES
from llama_variants import VARIANTS, plain_settings, rewired, stock_config, stock_model


def test_weights_missing_from_a_checkpoint_follow_the_init_policy(tmp_path):
    model = rewire(stock_model(), "deepnorm", init=True)
    state = {k: v for k, v in model.state_dict().items() if "v_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 3
    expected = create("deepnorm").init_rule("value", 3).std((16, 32), 0.0)
    drawn = torch.cat([block.self_attn.v_proj.weight.flatten() for block in blocks(loaded)])
    assert drawn.std().item() == pytest.approx(expected, rel=3 / math.sqrt(2 * drawn.numel()))


@pytest.mark.parametrize(
    "variant", [variant for variant in VARIANTS if not {"alphas", "layers"} & set(VARIANTS[variant][1])]
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_drawn_by_its_rule(variant, tied):
    name, options = VARIANTS[variant]
    config = GeonormLlamaConfig(
        **plain_settings(stock_config(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=tied)),
        placement=name,
        placement_options=options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    rows = init_report(model)
    assert [row.name for row in rows] == [parameter_name for parameter_name, _ in model.named_parameters()]
    assert sum(row.role in WEIGHT_ROLES for row in rows) == 7 * 2 + (1 if tied else 2)
    for row in rows:
        if row.role in WEIGHT_ROLES:
            size = math.prod(row.shape)
            assert row.std == pytest.approx(row.expected_std, rel=4 / math.sqrt(2 * size)), row
            assert abs(row.mean) < 5 * row.expected_std / math.sqrt(size), row
        elif row.role == "norm":
            assert (row.std, row.mean) == (0.0, 1.0), row
    if options.get("learnable"):
        steps = [block.attention_connection.alpha.item() for block in blocks(model)]
        assert steps == pytest.approx([1.0, 1 / math.sqrt(2)])


@pytest.mark.parametrize("start", ["stock", "rewired"])
def test_weights_from_a_checkpoint_can_be_drawn_anew(start, tmp_path):
    if start == "stock":
        stock_model(hidden_size=64).save_pretrained(tmp_path)
        model = rewire(LlamaForCausalLM.from_pretrained(tmp_path), "deepnorm", init=True)
    else:
        rewired("geonorm learnable", hidden_size=64).save_pretrained(tmp_path)
        model = init_weights(AutoModelForCausalLM.from_pretrained(tmp_path))
    for row in init_report(model):
        if row.role in WEIGHT_ROLES:
            assert row.std == pytest.approx(row.expected_std, rel=4 / math.sqrt(2 * math.prod(row.shape))), row
        elif row.role == "norm":
            assert (row.std, row.mean) == (0.0, 1.0), row
    if start == "rewired":
        assert blocks(model)[0].attention_connection.alpha.item() == pytest.approx(1.0)


def test_base_std_follows_the_width():
    assert base_std(768) == 0.02
    model = AutoModelForCausalLM.from_config(
        GeonormLlamaConfig(**{**plain_settings(stock_config()), "initializer_range": 0.01}, placement="post")
    )
    report = {row.name: row for row in init_report(model)}
    assert report["model.layers.0.mlp.up_proj.weight"].expected_std == pytest.approx(0.01 * math.sqrt(768 / 32))


def test_deepnorm_of_twelve_layers_through_from_config():
    settings = {**plain_settings(stock_config(num_hidden_layers=12, num_key_value_heads=4))}
    model = AutoModelForCausalLM.from_config(GeonormLlamaConfig(**settings, placement="deepnorm"))
    layers = blocks(model)
    assert layers[0].attention_connection.alpha == pytest.approx(2.2134, abs=5e-5)

    def pooled(part: str) -> float:
        return torch.cat([layer.get_submodule(part).weight.flatten() for layer in layers]).std().item()

    assert pooled("self_attn.v_proj") / pooled("self_attn.q_proj") == pytest.approx(0.3195, rel=0.03)
    assert pooled("self_attn.o_proj") / pooled("self_attn.k_proj") == pytest.approx(0.3195, rel=0.03)
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert pooled(f"mlp.{part}") == pytest.approx(0.3195 * math.sqrt(2 / (32 + 48)), rel=0.03)


def test_one_seed_gives_every_placement_the_same_draws_up_to_scale():
    reference = None
    for name in available():
        model = rewire(stock_model(), name)
        torch.manual_seed(7)
        init_weights(model)
        draws = {row.name: row for row in init_report(model) if row.role in WEIGHT_ROLES}
        unit = {key: model.get_parameter(key).detach() / row.expected_std for key, row in draws.items()}
        reference = reference or unit
        assert unit.keys() == reference.keys()
        for key, value in unit.items():
            expected, axis = reference[key], create(name).weight_axes.get(draws[key].role)
            if axis is not None:
                # Each row or column has a scale of its own.
                expected = expected * value.norm(dim=axis, keepdim=True) / expected.norm(dim=axis, keepdim=True)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["hyper", "mhc", "nag"])
def test_what_a_placement_draws_itself_follows_the_weights_and_the_seed(name):
    drawn = []
    for _ in range(2):
        model = rewire(stock_model(), name)
        torch.manual_seed(7)
        init_weights(model)
        rows = [row for row in init_report(model) if row.role == "step" and row.expected_std]
        # Two gates a connection, three with mixing, one at the exit; one of nag.
        assert len(rows) == 6 * {"hyper": 2, "mhc": 3, "nag": 1}[name] + (name != "nag")
        for row in rows:
            assert row.expected_std == 0.02
            assert row.std == pytest.approx(0.02, rel=4 / math.sqrt(2 * math.prod(row.shape)))
        drawn.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(value, drawn[1][key]) for key, value in drawn[0].items())


def test_each_layer_of_a_mixture_is_drawn_by_its_own_rule():
    model = rewire(stock_model(hidden_size=64), "mix", init=True, layers=["deepnorm", "post", "pre"])
    rows = {row.name: row for row in init_report(model)}
    base = 0.02 * math.sqrt(768 / 64)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        found = [rows[f"model.layers.{layer}.{part}.weight"] for layer in range(3)]
        xavier = 24**-0.25 * math.sqrt(2 / sum(found[0].shape))
        for row, expected in zip(found, (xavier, base, base / math.sqrt(6)), strict=True):
            assert row.expected_std == pytest.approx(expected)
            assert row.std == pytest.approx(expected, rel=4 / math.sqrt(2 * math.prod(row.shape)))


def test_init_report_of_a_stock_model_says_what_to_do():
    with pytest.raises(UserError, match=r"is a stock model; call geonorm\.models\.rewire"):
        init_report(stock_model())
