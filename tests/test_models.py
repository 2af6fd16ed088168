"""Rewired Llama models: wiring, saving, generating."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from geonorm import UserError
from geonorm.models import blocks, load_stock, rewire, supported_families
from geonorm.models.families import GeonormLlamaConfig, GeonormLlamaForCausalLM, GeonormLlamaModel
from geonorm.placements import create
from llama_variants import VARIANTS, plain_settings, rewired, stock_config, stock_model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def test_rewiring_to_the_stock_placement_changes_no_bit(ids):
    stock = stock_model()
    before = stock(ids, labels=ids, output_hidden_states=True)
    before.loss.backward()
    gradients = {name: p.grad.clone() for name, p in stock.named_parameters()}
    other = rewire(copy.deepcopy(stock), "pre")
    other.zero_grad()
    after = other(ids, labels=ids, output_hidden_states=True)
    after.loss.backward()
    assert torch.equal(before.logits, after.logits)
    assert all(torch.equal(a, b) for a, b in zip(before.hidden_states, after.hidden_states, strict=True))
    assert gradients.keys() == dict(other.named_parameters()).keys()
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_the_formula_applied_sub_layer_by_sub_layer(variant, ids):
    model = rewired(variant)
    name, options = VARIANTS[variant]
    placement = create(name, **options)
    h = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = model.model.rotary_emb(h, positions)
    stream = placement.open(h)
    for block in blocks(model):
        parts = {
            "attention": lambda z, b=block: b.self_attn(z, position_embeddings=rotary, attention_mask=None)[0],
            "mlp": block.mlp,
        }
        for sublayer, part in parts.items():
            norms = {slot: getattr(block, attribute) for slot, attribute in block.slots[sublayer].items()}
            stream = getattr(block, f"{sublayer}_connection")(stream, part, norms)
    last = blocks(model)[-1]
    norms = {slot: getattr(last, f"exit_{slot}_norm") for slot in placement.exit_norms}
    expected = model.lm_head(model.model.norm(placement.close(stream, getattr(last, "exit_module", None), norms)))
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_reload_give_the_same_bits(variant, ids, tmp_path):
    model = rewired(variant)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        GeonormLlamaForCausalLM.from_pretrained(tmp_path),
    ):
        assert type(loaded) is GeonormLlamaForCausalLM
        assert loaded.config.placement_options == model.config.placement_options
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        for (name, mine), (_, theirs) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
            assert torch.equal(mine, theirs), name
        assert torch.equal(loaded.eval()(ids).logits, expected)
    headless = AutoModel.from_pretrained(tmp_path).eval()
    assert type(headless) is GeonormLlamaModel
    assert torch.equal(headless(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_saved_model_keeps_options_that_were_defaults(tmp_path):
    rewire(stock_model(), "geonorm").save_pretrained(tmp_path)
    options = AutoConfig.from_pretrained(tmp_path).placement_options
    assert options == create("geonorm").options()


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_and_without_cache_and_left_padding(variant):
    model = rewired(variant)
    generator = torch.Generator().manual_seed(3)
    short = torch.randint(1, 61, (1, 3), generator=generator)
    long = torch.randint(1, 61, (1, 9), generator=generator)
    padded = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1), long])
    mask = (padded != 0).long()
    mask[1] = 1
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings["return_dict_in_generate"] = True
    both = model.generate(padded, attention_mask=mask, **settings)
    uncached = model.generate(padded, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(both.sequences, uncached.sequences)
    for row, prompt in enumerate((short, long)):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(both.sequences[row, -20:], alone.sequences[0, -20:])
        for a, b in zip(both.logits, alone.logits, strict=True):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a[row], b[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_states_attentions_and_gradient_checkpointing(variant, ids):
    model = rewired(variant)
    model.set_attn_implementation("eager")
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 4
    assert len(out.attentions) == 3
    assert out.attentions[0].shape == (2, 4, 9, 9)

    def gradients() -> dict:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model.train()
    plain = gradients()
    model.activation_checkpointing_enable()
    checkpointed = gradients()
    for name, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name]), name


def test_stock_checkpoint_loads_into_pre_bit_for_bit(ids, tmp_path):
    stock = stock_model()
    stock.save_pretrained(tmp_path)
    config = GeonormLlamaConfig(**plain_settings(stock.config), placement="pre")
    loaded = GeonormLlamaForCausalLM.from_pretrained(tmp_path, config=config).eval()
    assert torch.equal(loaded(ids).logits, stock(ids).logits)


def test_stock_checkpoint_loads_into_other_placements_and_says_what_had_no_place(tmp_path):
    stock = stock_model()
    stock.save_pretrained(tmp_path)
    for placement, unused, fresh in (("geonorm", 6, 0), ("sandwich", 0, 6), ("post", 7, 6)):
        config = GeonormLlamaConfig(**plain_settings(stock.config), placement=placement)
        loaded, info = GeonormLlamaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
        assert len(info["unexpected_keys"]) == unused, placement
        assert len(info["missing_keys"]) == fresh, placement
        assert all("norm" in key for key in [*info["unexpected_keys"], *info["missing_keys"]])
        weights = loaded.state_dict()
        assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], stock.model.layers[1].mlp.up_proj.weight)
        for key in info["missing_keys"]:
            assert torch.equal(weights[key], torch.ones(32)), key


def test_only_the_rewired_model_changes(ids):
    config = stock_config()
    torch.manual_seed(0)
    one, two = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    before, names = two(ids).logits, list(two.state_dict())
    rewire(one, "geonorm")
    assert type(two) is LlamaForCausalLM
    assert type(config) is LlamaConfig
    assert list(two.state_dict()) == names
    assert torch.equal(two(ids).logits, before)


def test_rewiring_twice():
    model = rewire(stock_model(), "geonorm", decay="sqrt")
    weights = [p.data_ptr() for p in model.parameters()]
    assert rewire(model, "geonorm", decay="sqrt") is model
    assert [p.data_ptr() for p in model.parameters()] == weights
    with pytest.raises(UserError, match=r"already rewired to geonorm\(decay=sqrt\)"):
        rewire(model, "pre")


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": np.float32(0.5), "retraction": np.int64(2), "learnable": np.bool_(True)},
        {"alphas": np.linspace(0.5, 1, 6), "max_angle": torch.tensor(0.5)},
        {"alphas": torch.linspace(0.5, 1, 6)},
    ],
)
def test_options_of_other_libraries_are_saved_like_plain_ones(options, ids, tmp_path):
    placement = create("geonorm", **options)
    settings = {**plain_settings(stock_config()), "placement": "geonorm", "placement_options": options}
    for model in (rewire(stock_model(), "geonorm", **options), GeonormLlamaForCausalLM(GeonormLlamaConfig(**settings))):
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.placement_options == placement.options()
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    _, report = load_stock(stock_model(), "geonorm", **options)
    assert report.placement == placement


def test_unsupported_model_lists_what_is_supported():
    with pytest.raises(UserError, match=r"cannot rewire a Linear; take a decoder of a supported family \(.*llama"):
        rewire(torch.nn.Linear(2, 2), "pre")
    assert "llama" in supported_families()


def test_failed_rewire_leaves_the_model_as_it_was(ids):
    stock = stock_model()
    before = stock(ids).logits
    with pytest.raises(UserError, match="did you mean 'geonorm'"):
        rewire(stock, "geonrom")
    with pytest.raises(UserError, match="`alpha` must be positive"):
        rewire(stock, "geonorm", alpha=-1.0)
    with pytest.raises(UserError, match="`alphas` has 4 step sizes, but 3 layers take 6"):
        rewire(stock, "geonorm", alphas=[1.0] * 4)
    assert type(stock) is LlamaForCausalLM
    assert torch.equal(stock(ids).logits, before)


def test_config_with_a_bad_placement():
    with pytest.raises(UserError, match="unknown placement 'geo'"):
        GeonormLlamaConfig(placement="geo")


def test_headless_model(ids):
    torch.manual_seed(0)
    stock = LlamaModel(stock_config()).eval()
    before = stock(ids).last_hidden_state
    model = rewire(stock, "pre")
    assert type(model) is GeonormLlamaModel
    assert torch.equal(model(ids).last_hidden_state, before)


def test_bfloat16_model_survives_reload_and_keeps_one_dtype(ids, tmp_path):
    name, options = VARIANTS["geonorm learnable"]
    model = rewire(stock_model().to(torch.bfloat16), name, **options)
    with torch.no_grad():
        model.model.layers[0].attention_connection.raw_alpha.fill_(0.1234567)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert torch.isfinite(loaded(ids).logits).all()
    assert {p.dtype for p in rewire(stock_model().to(torch.bfloat16), "sandwich").parameters()} == {torch.bfloat16}


def test_resized_and_tied_vocabulary_survives_reload(ids, tmp_path):
    model = rewired("geonorm", tie_word_embeddings=True)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(64)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 64
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.model.embed_tokens.weight[:61], old)
    loss = loaded(ids, labels=ids).loss
    loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert loaded(ids, labels=ids).loss < loss
