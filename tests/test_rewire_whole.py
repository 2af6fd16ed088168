"""Rewiring is all or nothing: quantised models, failures on the way, models that are wired in part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from family_models import adapter_of, prompts, rewired_model, stock_config, stock_model
from geonorm import UserError
from geonorm.conversion import convert_model
from geonorm.models import base_model, blocks, current_placement, init_weights, load_stock, rewire, stock_placement
from geonorm.models.families import GeonormLlamaConfig, GeonormLlamaForCausalLM
from geonorm.placements import Site, create
from geonorm.placements.pre import PreNorm

# --- quantised models -----------------------------------------------------------------------------------------------


class EightBit(nn.Linear):
    """A linear layer as quantisers make them: a flat uint8 weight, and beside it what turns it back."""

    def __init__(self, weight, bias) -> None:
        super().__init__(1, 1, bias=False)
        scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / scale + 128).round().to(torch.uint8).flatten(), requires_grad=False)
        self.quant_state, self.bias = (scale, weight.shape), bias

    def forward(self, h):
        scale, shape = self.quant_state
        return nn.functional.linear(h, ((self.weight.float() - 128) * scale).view(shape), self.bias)


def quantised(family):
    """A stock model whose blocks hold quantised weights; norms, embeddings and head are as they were."""
    model = stock_model(family)
    for block in blocks(model):
        for name, module in list(block.named_modules()):
            if isinstance(module, (nn.Linear, Conv1D)):
                weight = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
                block.set_submodule(name, EightBit(weight, module.bias))
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3", "gemma2"])
def test_a_quantised_model_is_rewired_and_keeps_its_weights(family):
    model, ids = quantised(family), prompts(2, 9)
    expected = model(ids).logits
    weights = {name: value.clone() for name, value in model.state_dict().items() if value.dtype == torch.uint8}
    assert weights
    same = rewire(copy.deepcopy(model), stock_placement(model))
    assert torch.equal(same(ids).logits, expected)
    assert rewire(model, "geonorm", learnable=True) is model
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    model(ids, labels=ids).loss.backward()
    for block in blocks(model):
        step = block.attention_connection.raw_alpha
        assert step.dtype == torch.float32
        assert bool(step.grad.isfinite())
    added = load_stock(quantised(family), "post")[0]
    assert bool(added(ids).logits.isfinite().all())


def test_quantised_weights_are_refused_by_a_placement_that_works_inside():
    model = quantised("llama")
    kind = type(model)
    with pytest.raises(UserError, match=r"placement 'ngpt' works on what .* returns, whose weight is quantised"):
        rewire(model, "ngpt")
    assert type(model) is kind


def test_quantised_weights_cannot_be_drawn_anew_or_folded():
    model = quantised("llama")
    before = state_of(model)
    with pytest.raises(UserError, match=r"cannot be drawn anew: model.layers.0.*is quantised \(uint8\)") as caught:
        rewire(model, "geonorm", init=True)
    assert "\n" not in str(caught.value)
    assert state_of(model) == before
    with pytest.raises(UserError, match=r"folded into plain linear layers alone, and the norm .* is read by EightBit"):
        convert_model(model, prompts(2, 9))
    assert state_of(model) == before
    rewire(model, "geonorm")
    head = model.lm_head.weight.clone()
    with pytest.raises(UserError, match="quantised"):
        init_weights(model)
    assert torch.equal(model.lm_head.weight, head)


def test_a_model_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    stock_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "stock")
    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", quantization_config=settings, device_map="cpu")
    ids = prompts(1, 5)
    assert torch.equal(rewire(copy.deepcopy(model), "pre")(ids).logits, model(ids).logits)
    rewire(model, "geonorm", learnable=True)
    model.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is GeonormLlamaForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)


# --- failures on the way --------------------------------------------------------------------------------------------


def state_of(model):
    """What a model is made of, to compare: classes, objects and order, hooks, configurations, values."""
    modules = [(name, type(module), id(module)) for name, module in model.named_modules()]
    held = [
        (id(module), key, list(value.items()) if isinstance(value, dict) else id(value))
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers")
    ]
    tensors = [(name, id(value), value.detach().sum().item()) for name, value in model.named_parameters()]
    return modules, held, tensors, model.config.to_dict()


class Fails(PreNorm):
    """A placement of a user's own with a mistake that shows at the last connection."""

    error: type[BaseException] = RuntimeError

    def connection(self, site: Site):
        if (site.layer, site.sublayer) == (site.num_layers, "mlp"):
            raise self.error("no more")
        return super().connection(site)


class Interrupted(Fails):
    error = KeyboardInterrupt


class Uncopied(nn.RMSNorm):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copy")


def odd_norm(model):
    model.model.layers[1].input_layernorm = Uncopied(32)


def odd_parameter(model):
    model.model.extra = nn.Parameter(torch.zeros(3))


def odd_config(model):
    model.config.lock = (value for value in ())


def as_it_is(model):
    pass


FAILURES = {
    "connection": (as_it_is, lambda model: rewire(model, Fails()), RuntimeError),
    "interrupt": (as_it_is, lambda model: rewire(model, Interrupted()), KeyboardInterrupt),
    "norm": (odd_norm, lambda model: rewire(model, "sandwich"), RuntimeError),
    "configuration": (odd_config, lambda model: rewire(model, "geonorm"), TypeError),
    "drawing": (odd_parameter, lambda model: rewire(model, "geonorm", init=True), UserError),
    "step sizes": (as_it_is, lambda model: rewire(model, "geonorm", alphas=[0.5] * 6), UserError),
    "loading": (as_it_is, lambda model: load_stock(model, "geonorm", alphas=[0.5] * 6), UserError),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("headless", [False, True])
def test_after_a_failure_the_model_is_as_it_was(case, headless):
    prepare, call, error = FAILURES[case]
    model, calls, ids = stock_model("llama"), [], prompts(2, 9)
    prepare(model)
    block = model.model.layers[0]
    handle = block.register_forward_hook(lambda *args: calls.append(1))
    model = model.model if headless else model
    model(ids, output_hidden_states=True)
    expected = model(ids)[0]
    before = state_of(model) if case != "configuration" else type(model)
    calls.clear()
    with pytest.raises(error):
        call(model)
    assert (state_of(model) if case != "configuration" else type(model)) == before
    assert torch.equal(model(ids)[0], expected)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    assert len(calls) == 2
    # The user's handle still takes the hook off.
    handle.remove()
    model(ids)
    assert len(calls) == 2
    if prepare is as_it_is:
        assert torch.equal(rewire(model, "pre")(ids)[0], expected)


def test_tensors_of_inference_mode_are_not_half_drawn():
    with torch.inference_mode():
        model = LlamaForCausalLM(stock_config("llama"))
    before = state_of(model)
    with pytest.raises(UserError, match="is an inference tensor; load the model without"):
        rewire(model, "geonorm", init=True)
    assert state_of(model) == before


# --- models that are wired in part ----------------------------------------------------------------------------------


def refused(model, message, placement="geonorm"):
    before = state_of(model)
    with pytest.raises(UserError, match=message) as caught:
        rewire(model, placement)
    assert "\n" not in str(caught.value)
    assert state_of(model) == before


def test_a_model_that_is_wired_in_part_is_never_called_rewired():
    inner = stock_model("llama")
    rewire(base_model(inner), "geonorm")
    refused(inner, r"this LlamaForCausalLM is rewired in part \(layer 1 differs\); load the stock model again")
    mixed = rewired_model("llama", "geonorm")
    mixed.model.layers[1] = blocks(stock_model("llama"))[1]
    refused(mixed, r"this GeonormLlamaForCausalLM is rewired in part \(layer 2 differs\)")


def test_layers_that_are_not_the_familys_own_are_refused():
    class Wrapped(adapter_of("llama").stock.block):
        pass

    model = stock_model("llama")
    model.model.layers[1].__class__ = Wrapped
    refused(model, "cannot rewire this LlamaForCausalLM: layer 2 is a Wrapped, not a LlamaDecoderLayer")
    twice = stock_model("llama")
    twice.model.layers[1] = twice.model.layers[0]
    refused(twice, "it has 1 different layers where its configuration has num_hidden_layers=2")
    cut = stock_model("llama")
    cut.model.layers = cut.model.layers[:1]
    refused(cut, "it has 1 different layers where its configuration has num_hidden_layers=2")


def test_a_forward_that_was_replaced_would_win_and_is_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = stock_model("llama"), prompts(1, 5)
    expected = model(ids).logits
    hooks.add_hook_to_module(model.model.layers[1], hooks.AlignDevicesHook("cpu"))
    refused(model, "the forward of a LlamaDecoderLayer was replaced, as accelerate's hooks do; rewire the model before")
    hooks.remove_hook_from_module(model, recurse=True)
    hooks.add_hook_to_module(model.model.layers[1].input_layernorm, hooks.AlignDevicesHook("cpu"))
    refused(model, "the forward of a LlamaRMSNorm was replaced")
    hooks.remove_hook_from_module(model, recurse=True)
    # accelerate leaves the stock forward on the module itself; the new class must be what runs.
    assert torch.equal(rewire(copy.deepcopy(model), "pre")(ids).logits, expected)
    assert not torch.equal(rewire(model, "geonorm")(ids).logits, expected)


def test_the_class_says_what_a_model_is_and_not_its_configuration():
    settings = stock_config("llama").to_dict()
    settings.pop("model_type")
    torch.manual_seed(0)
    stock = LlamaForCausalLM(GeonormLlamaConfig(**settings, placement="geonorm")).eval()
    assert current_placement(stock) == create("pre")
    before = stock(prompts(1, 5)).logits
    rewire(stock, "geonorm")
    assert type(stock) is GeonormLlamaForCausalLM
    assert current_placement(stock) == create("geonorm")
    assert not torch.equal(stock(prompts(1, 5)).logits, before)


def test_a_loaded_model_says_its_new_type(tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    model = rewire(LlamaForCausalLM.from_pretrained(tmp_path), "geonorm")
    assert model.config.model_type == "geonorm_llama"
