"""What newer placements add to rewired models: modules in attention and MLP, weights of length 1, options of all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from family_models import FAMILIES, NEWER, adapter_of, is_refused, prompts, rewired_model, stock_model
from geonorm.inspection.probe import recorded_angles
from geonorm.models import blocks, init_report, init_weights, normalize_weights, rewire
from geonorm.placements import Learned, available, create, set_training_step
from geonorm.placements.norm_kinds import NORM_KINDS
from geonorm.training.optimizer import muon_with_adamw, parameter_groups
from tolerances import EPS, SAME_LOGITS, worst

UNIT_FAMILIES = [family for family in FAMILIES if not is_refused(family, "ngpt")]
every_unit_family = pytest.mark.parametrize("family", UNIT_FAMILIES)


def with_options(placement):
    options = {"gain": "scalar", "warm_depth": 3}
    options |= {"entry_skip": True} if create(placement).single_stream else {}
    return options | ({"norm": "dyt"} if create(placement).norms or create(placement).final_norm else {})


# --- compiled -------------------------------------------------------------------------------------------------------


# One of each kind of stream and of module; all the others are slow, at two seconds each.
COMPILED = ("mix", "attnres", "mhc", "ngpt")


@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=[] if name in COMPILED else pytest.mark.slow) for name in available()]
)
def test_a_rewired_model_is_one_graph(placement):
    """With every option that the placement takes."""
    model, ids = rewired_model("llama", placement, options=with_options(placement)), prompts(1, 7)
    set_training_step(model, 2)
    expected = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=SAME_LOGITS, rtol=SAME_LOGITS)


# --- queries and keys of length 1 -----------------------------------------------------------------------------------


@every_unit_family
def test_every_attention_implementation_gives_the_same_logits_with_unit_heads(family):
    model, ids = rewired_model(family, "ngpt"), prompts(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
        got = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=SAME_LOGITS, rtol=SAME_LOGITS)


def test_weights_of_attention_are_those_of_unit_queries_and_keys():
    model, ids = rewired_model("llama", "ngpt"), prompts(1, 6)
    model.set_attn_implementation("eager")
    attention, seen = blocks(model)[0].self_attn, {}
    attention.heads.register_forward_hook(lambda module, args, output: seen.update(given=args, made=output))
    weights = model(ids, output_attentions=True).attentions[0]
    query, key, _ = seen["given"]
    query, key, scaling = seen["made"]
    given = [rows / rows.norm(dim=-1, keepdim=True) for rows in seen["given"][:2]]
    # Stored at 1/sqrt(d), the product with query and key alike.
    scale = (attention.heads.scale * 32**0.5).view(4, 1, 8)
    exact = (scale * given[0]) @ (scale * given[1].repeat_interleave(2, 1)).mT * 8**0.5
    exact = exact.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)
    assert scaling == 8**0.5
    assert worst(key.norm(dim=-1), torch.ones(1, 2, 6)) <= 8 * EPS[torch.float32]
    assert query.shape == (1, 4, 6, 8)
    assert worst(weights, exact) <= SAME_LOGITS


def test_a_copy_has_an_attention_implementation_of_its_own():
    model, ids = rewired_model("llama", "ngpt"), prompts(1, 6)
    model.set_attn_implementation("sdpa")
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    assert copied(ids, output_attentions=True).attentions[0] is not None
    assert model.config._attn_implementation == "sdpa"
    assert blocks(model)[0].self_attn.config._attn_implementation.endswith("sdpa")
    assert blocks(copied)[0].self_attn.config._attn_implementation.endswith("eager")


# --- weights of length 1 --------------------------------------------------------------------------------------------

INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "dense_h_to_4h", "embed_tokens", "embed_in", "lm_head")
OUTPUTS = ("o_proj", "down_proj", "attention.dense", "dense_4h_to_h")


def lengths(name, weight):
    """Lengths that a placement on the sphere keeps at 1: of each row ``[out, in]``, of columns where a map writes."""
    if name.endswith(("c_attn.weight", "c_fc.weight")):
        return weight.norm(dim=0)
    if name.endswith("c_proj.weight"):
        return weight.norm(dim=1)
    if name.endswith(("wte.weight", "wpe.weight", "query_key_value.weight")):
        return weight.norm(dim=1)
    part = name.removesuffix(".weight")
    if part.endswith(INPUTS):
        return weight.norm(dim=1)
    return weight.norm(dim=0) if part.endswith(OUTPUTS) else None


@every_unit_family
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_brought_back_after_a_step_of_the_optimiser(family, tied):
    model, ids = rewire(stock_model(family, tie_word_embeddings=tied), "ngpt", init=True), prompts(2, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: normalize_weights(model))
    kept = {name: lengths(name, p.detach().double()) for name, p in model.named_parameters() if p.dim() == 2}
    assert all(found is not None for found in kept.values()), kept.keys()
    for _ in range(3):
        for found in kept.values():
            assert worst(found, torch.ones_like(found)) <= 4 * EPS[torch.float32]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}
        assert all(moved.values()), moved
        kept = {name: lengths(name, p.detach().double()) for name, p in model.named_parameters() if p.dim() == 2}


def test_a_row_of_zeros_stays_and_narrow_weights_are_measured_in_float32():
    model = rewire(stock_model("llama").bfloat16(), "ngpt", init=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = 0
        model.model.layers[0].self_attn.q_proj.weight.mul_(100)
    normalize_weights(model)
    assert not model.model.embed_tokens.weight[3].any()
    rows = model.model.layers[0].self_attn.q_proj.weight.double().norm(dim=1)
    # Entries are rounded one by one.
    assert worst(rows, torch.ones(32)) <= EPS[torch.bfloat16]


def test_other_models_are_left_alone():
    for model in (rewired_model("llama", "pre"), stock_model("llama")):
        before = copy.deepcopy(model.state_dict())
        normalize_weights(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- what a placement learns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", available())
def test_what_a_placement_learns_is_not_decayed_and_goes_to_adamw(placement):
    model = rewire(stock_model("llama"), placement, **with_options(placement))
    matrices = {name for name, p in stock_model("llama").named_parameters() if p.dim() == 2}
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert decayed == matrices
    assert decayed | spared == set(names.values())
    muon, adamw = muon_with_adamw(model, lr=1e-3, betas=(0.9, 0.95), momentum=0.95, weight_decay=0.1).optimizers
    inner = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert inner == {name for name in matrices if ".layers." in name}
    assert {names[id(p)] for p in adamw.param_groups[0]["params"]} == matrices - inner
    own = {id(p) for module in model.modules() if isinstance(module, Learned) for p in module.parameters()}
    assert own <= {id(p) for p in adamw.param_groups[1]["params"]}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_norms_of_a_rewired_model_are_of_the_kind_asked_for(family, kind, tmp_path):
    for placement in ("pre", "siamese"):
        stock = stock_model(family)
        heads = [name for name, _ in stock.named_modules() if name.endswith(("q_norm", "k_norm"))]
        model = rewire(stock, placement, norm=kind, init=True).eval()
        kinds = {name: type(module) for name, module in model.named_modules() if "norm" in name or "ln_" in name}
        others = {name for name, found in kinds.items() if found is not NORM_KINDS[kind]}
        # The norms on queries and keys belong to the family's attention.
        assert others == set(heads)
        for row in init_report(model):
            assert row.role in ("step", "norm", "bias") or row.expected_std > 0
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.placement_options["norm"] == kind
        assert torch.equal(loaded(prompts(1, 5)).logits, model(prompts(1, 5)).logits)


def training_steps(model):
    return {int(buffer) for name, buffer in model.named_buffers() if name.endswith("training_step")}


def test_the_step_of_a_warm_up_is_saved_and_0_where_a_checkpoint_has_none(tmp_path):
    model = rewire(stock_model("llama"), "pre", warm_depth=5)
    assert training_steps(model) == {0}
    set_training_step(model, 7)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert training_steps(loaded) == {7}
    assert training_steps(init_weights(loaded)) == {0}
    plain = rewired_model("llama", "pre")
    plain.save_pretrained(tmp_path / "plain")
    config = copy.deepcopy(model.config)
    model = adapter_of("llama").rewired.causal_lm.from_pretrained(tmp_path / "plain", config=config)
    assert training_steps(model) == {0}
    set_training_step(model, 100)
    ids = prompts(1, 5)
    assert torch.equal(model.eval()(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("placement", available())
def test_angles_of_a_rewired_model_with_every_option_are_found(placement):
    """Of the points before and after each sub-layer, the one within a layer beside its entry too."""
    model = rewired_model("llama", placement, options=with_options(placement))
    set_training_step(model, 10)
    with recorded_angles(model) as angles:
        model(prompts(2, 9))
    found = torch.tensor([angles["attention"], angles["mlp"]])
    assert found.shape == (2, 2)
    assert bool((found > 0).all())


@pytest.mark.parametrize("placement", NEWER)
def test_a_model_without_a_head_gives_the_states_of_the_one_with(placement):
    model, ids = rewired_model("llama", placement), prompts(2, 9)
    states = model.model(ids).last_hidden_state
    assert states.shape == (2, 9, 32)
    assert torch.equal(model.lm_head(states), model(ids).logits)
    assert isinstance(model.model.norm, nn.Identity) != create(placement).final_norm
