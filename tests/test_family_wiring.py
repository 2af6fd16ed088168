"""Families one by one: the stock placement to the bit, fused weights, and what single families have of their own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from family_models import FAMILIES, adapter_of, prompts, rewired_model, stock_config, stock_model
from geonorm import UserError
from geonorm.models import (
    base_model,
    blocks,
    current_placement,
    init_report,
    init_weights,
    load_stock,
    rewire,
    stock_placement,
)

STOCK = {
    "gemma2": "sandwich(normalize_entry=False)",
    "gemma3_text": "sandwich(normalize_entry=False)",
    "olmo2": "output(normalize_entry=False)",
    "gpt_neox": "parallel",
}
every_family = pytest.mark.parametrize("family", FAMILIES)


# --- the stock placement --------------------------------------------------------------------------------------------


@every_family
def test_stock_placement_is_named_and_changes_no_bit(family):
    stock, ids = stock_model(family), prompts(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    assert stock_placement(stock).label() == STOCK.get(family, "pre")
    other = rewire(copy.deepcopy(stock), stock_placement(stock))
    assert type(other) is adapter_of(family).rewired.causal_lm
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in stock.named_parameters()]
    before, after = (model(ids, attention_mask=mask, labels=ids, output_hidden_states=True) for model in (stock, other))
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    assert all(torch.equal(a, b) for a, b in zip(before.hidden_states, after.hidden_states, strict=True))
    before.loss.backward()
    after.loss.backward()
    for (name, one), two in zip(stock.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


@every_family
def test_stock_placement_changes_no_bit_under_dropout_in_bfloat16_and_without_a_head(family):
    stock, ids = stock_model(family, dropout=0.2), prompts(2, 9)
    other = rewire(copy.deepcopy(stock), stock_placement(stock))

    def drawn(model):
        torch.manual_seed(5)
        return model.train()(ids, use_cache=False).logits

    assert torch.equal(drawn(stock), drawn(other))
    narrow = stock_model(family).to(torch.bfloat16)
    assert torch.equal(narrow(ids).logits, rewire(copy.deepcopy(narrow), stock_placement(narrow))(ids).logits)
    headless = base_model(stock_model(family))
    expected = headless(ids).last_hidden_state
    assert torch.equal(rewire(headless, stock_placement(headless))(ids).last_hidden_state, expected)
    assert type(headless) is adapter_of(family).rewired.model


# --- the weights of a stock checkpoint ------------------------------------------------------------------------------


@every_family
def test_stock_weights_load_with_a_report(family, tmp_path):
    stock, ids = stock_model(family), prompts(2, 9)
    stock.save_pretrained(tmp_path)
    names = [name for name, _ in stock.named_parameters()]
    model, report = load_stock(tmp_path, stock_placement(stock))
    assert (report.kept, report.unused, report.added) == (len(names), (), ())
    assert torch.equal(model.eval()(ids).logits, stock(ids).logits)

    model, report = load_stock(tmp_path, "geonorm", learnable=True)
    norms = set(adapter_of(family).norms.values())
    expected = [name for name in names if any(f".{norm}." in name for norm in norms)]
    assert list(report.unused) == expected
    assert len(expected) == 2 * len(norms) * (2 if family.startswith("gpt") else 1)
    assert len(report.added) == 4
    assert report.kept == len(names) - len(expected)
    assert f"{len(expected)} unused ({expected[0]}, ...); 4 new" in str(report)
    for name, parameter in model.named_parameters():
        assert name in report.added or torch.equal(parameter, stock.get_parameter(name)), name

    changed, report = load_stock(stock, "post")
    assert changed is stock
    assert current_placement(changed).name == "post"
    unit = 0.0 if family.startswith("gemma") else 1.0
    for name in report.added:
        parameter = changed.get_parameter(name)
        assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else unit)), name
    with pytest.raises(UserError, match="already rewired to post; load_stock takes a stock model"):
        load_stock(changed, "pre")


# --- fused and turned weights ---------------------------------------------------------------------------------------


def attention_of(family, block):
    return getattr(block, adapter_of(family).attention)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
@pytest.mark.parametrize("role", ["query", "key", "value"])
def test_views_of_a_fused_weight_are_what_they_are_called(family, role):
    model, ids = stock_model(family), prompts(1, 9)
    attention, seen = attention_of(family, blocks(model)[0]), {}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
        for name, parameter in model.named_parameters():
            for part in adapter_of(family).views(name, parameter, model.config) or ():
                if part.role == role and part.label and name.startswith(f"{first_block(model)}."):
                    part.view.zero_()
                    seen[name] = part
    assert len(seen) == 1
    outputs = []
    attention.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(ids)
    update, weights = outputs[0][0], outputs[0][1]
    causal = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    if role == "value":
        assert not update.any()
    else:
        # Without queries or keys every score is 0, so that each token attends evenly to those before it.
        torch.testing.assert_close(weights, causal.expand_as(weights))
        assert update.any()


def first_block(model):
    return next(name for name, module in model.named_modules() if module is blocks(model)[0])


def sliced(family, name, weight, heads):
    """Query, key and value as `[out, in]`, sliced anew from a fused weight, or None for another weight."""
    if name.endswith("c_attn.weight"):
        return weight.T.chunk(3, 0)
    if name.endswith("query_key_value.weight"):
        return [part.reshape(-1, weight.shape[1]) for part in weight.view(heads, 3, -1, weight.shape[1]).unbind(1)]
    if name.endswith("qkv_proj.weight"):
        return weight.chunk(3, 0)
    return None


@every_family
@pytest.mark.parametrize("beta_on_up", [True, False])
def test_deepnorm_of_twelve_layers(family, beta_on_up):
    shape = {"num_key_value_heads": 4} if hasattr(stock_config(family), "num_key_value_heads") else {}
    if "head_dim" in stock_config(family).to_dict():
        shape["head_dim"] = 16
    for key in ("layer_types", "no_rope_layers"):
        if getattr(stock_config(family), key, None) is not None:
            shape[key] = None
    config = stock_config(family, num_hidden_layers=12, hidden_size=64, **shape).to_dict()
    config.pop("model_type")
    torch.manual_seed(0)
    placed = {"placement": "deepnorm", "placement_options": {"beta_on_up": beta_on_up}}
    model = AutoModelForCausalLM.from_config(adapter_of(family).rewired.config(**{**config, **placed}))
    layers = blocks(model)
    assert layers[0].attention_connection.alpha == layers[11].mlp_connection.alpha == pytest.approx(2.2134, abs=5e-5)
    weights = {"query": [], "key": [], "value": []}
    output, feed_forward, linear = [], [], []
    for name, parameter in model.named_parameters():
        parts = sliced(family, name, parameter.detach(), config.get("num_attention_heads", config.get("n_head")))
        separate = [f"{letter}_proj.weight" for letter in "qkv"]
        if parts is not None:
            for role, part in zip(weights, parts, strict=True):
                weights[role].append(part.flatten())
        elif any(name.endswith(ending) for ending in separate):
            weights[{"q": "query", "k": "key", "v": "value"}[name[-len("q_proj.weight")]]].append(parameter.flatten())
        elif name.endswith(("o_proj.weight", "attn.c_proj.weight", "attention.dense.weight")):
            output.append(parameter.flatten())
        elif ".mlp." in name and parameter.dim() == 2:
            parts = parameter.chunk(2, 0) if "gate_up" in name else [parameter]
            drawn = [part.detach().flatten() / math.sqrt(2 / sum(part.shape)) for part in parts]
            (linear if "up_proj" in name else feed_forward).append(drawn.pop())
            feed_forward += drawn
    stds = {role: torch.cat(values).std().item() for role, values in weights.items()}
    # 12 layers of 64 times 64 numbers: the standard error of a standard deviation is 0.3%.
    assert stds["value"] / stds["query"] == pytest.approx(0.3195, rel=0.02)
    assert stds["query"] == pytest.approx(stds["key"], rel=0.02)
    assert stds["query"] == pytest.approx(math.sqrt(2 / 128), rel=0.02)
    assert torch.cat(output).std().item() == pytest.approx(0.3195 * math.sqrt(2 / 128), rel=0.02)
    assert torch.cat(feed_forward).std().item() == pytest.approx(0.3195, rel=0.02)
    assert bool(linear) == (not family.startswith("gpt"))
    if linear:
        assert torch.cat(linear).std().item() == pytest.approx(0.3195 if beta_on_up else 1.0, rel=0.02)


def test_fused_parts_are_rows_of_the_audit():
    rows = [row for row in init_report(rewired_model("gpt2", "deepnorm")) if "h.0.attn.c_attn.weight" in row.name]
    assert [row.name.partition("weight")[2] for row in rows] == ["[query]", "[key]", "[value]"]
    assert {row.shape for row in rows} == {(32, 32)}
    (inner,) = (row for row in init_report(rewired_model("gpt2", "pre")) if "h.0.mlp.c_fc.weight" in row.name)
    assert inner.shape == (48, 32)


@every_family
def test_one_seed_gives_every_placement_the_same_draws_up_to_scale(family):
    reference = None
    for name in ("pre", "deepnorm", "parallel"):
        model = rewire(stock_model(family), name)
        torch.manual_seed(7)
        drawn = init_weights(model)
        weight = drawn.get_output_embeddings().weight.detach().clone()
        assert reference is None or torch.equal(weight, reference)
        reference = weight


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3"])
def test_weights_missing_from_a_checkpoint_follow_the_init_policy(family, tmp_path):
    model = rewired_model(family, "deepnorm")
    lost = {"gpt2": "c_proj", "gemma2": "input_layernorm", "phi3": "qkv_proj"}[family]
    if family == "gemma2":
        model = rewired_model(family, "sandwich")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if lost not in k})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"]
    assert all(lost in key for key in info["missing_keys"])
    for row in init_report(loaded):
        if lost in row.name and row.expected_std:
            assert row.std == pytest.approx(row.expected_std, rel=5 / math.sqrt(2 * math.prod(row.shape))), row
        elif lost in row.name:
            assert (row.std, row.mean) == (0.0, 0.0), row


@pytest.mark.parametrize(("family", "lost"), [("gpt2", "c_attn.bias"), ("gpt_neox", "query_key_value.bias")])
def test_a_fused_weight_from_a_checkpoint_stays_where_its_bias_is_missing(family, lost, tmp_path):
    model = rewired_model(family, "deepnorm")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if lost not in k})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if lost in name else parameter
        assert torch.equal(loaded.get_parameter(name), expected), name


# --- single families ------------------------------------------------------------------------------------------------


def test_updates_of_granite_keep_their_multiplier_in_every_placement():
    for placement in ("pre", "post", "geonorm"):
        model = rewired_model("granite", placement)
        block, seen = blocks(model)[0], []
        block.mlp.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        connection = block.mlp_connection
        updates = []

        def watched(stream, sublayer, norms, inner=connection.forward, updates=updates):
            return inner(stream, lambda z: updates.append(sublayer(z)) or updates[-1], norms)

        connection.forward = watched
        model(prompts(1, 5))
        assert torch.equal(updates[0], 0.3 * seen[0])


def test_gpt2_with_cross_attention_is_refused():
    config = stock_config("gpt2", add_cross_attention=True)
    stock = adapter_of("gpt2").stock.causal_lm(config)
    with pytest.raises(UserError, match=r"cannot rewire a GPT-2 with cross-attention.*add_cross_attention=False"):
        rewire(stock, "pre")
    assert type(stock) is adapter_of("gpt2").stock.causal_lm
    settings = {**config.to_dict(), "placement": "pre"}
    settings.pop("model_type")
    with pytest.raises(UserError, match="cannot rewire a GPT-2 with cross-attention"):
        adapter_of("gpt2").rewired.causal_lm(adapter_of("gpt2").rewired.config(**settings))
    with pytest.raises(UserError, match="cannot take 'encoder_hidden_states'"):
        rewired_model("gpt2", "pre")(prompts(1, 3), encoder_hidden_states=torch.zeros(1, 3, 32))
