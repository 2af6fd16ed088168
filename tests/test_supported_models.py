"""Which models can be rewired, and what is said of the others."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaForSequenceClassification, T5Config
from transformers import T5ForConditionalGeneration as T5

from family_models import FAMILIES, adapter_of, prompts, rewired_model, stock_config
from geonorm import UserError
from geonorm.models import (
    blocks,
    load_stock,
    rewire,
    stock_placement,
    supported_families,
)
from geonorm.models.adapter import ADAPTERS


def test_every_row_is_a_family_and_its_classes_are_where_they_say():
    assert len(ADAPTERS) == len(supported_families()) == len(set(supported_families()))
    assert set(supported_families()) == {family.split()[0] for family in FAMILIES}
    for adapter in ADAPTERS:
        for stock, ours in zip(adapter.stock, adapter.rewired, strict=True):
            assert ours.__name__ == ours.__qualname__ == f"Geonorm{stock.__name__}"
            assert getattr(importlib.import_module(ours.__module__), ours.__name__) is ours
            assert pickle.loads(pickle.dumps(ours)) is ours
        assert adapter.rewired.config.model_type == f"geonorm_{adapter.family}"
    assert importlib.import_module("geonorm.models.families").GeonormMistralForCausalLM


def test_a_rewired_model_can_be_pickled_and_says_which_blocks_must_not_be_split():
    model, ids = rewired_model("gpt_neox", "geonorm"), prompts(1, 5)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, model(ids).logits)
    built = adapter_of("gpt_neox").rewired.causal_lm(model.config)
    assert model._no_split_modules == {"GeonormGPTNeoXLayer"}
    assert "GeonormGPTNeoXLayer" in built._no_split_modules


def tiny(kind):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    return BertConfig(**shape, intermediate_size=8) if kind == "bert" else T5Config(d_model=8, d_ff=8, num_layers=1)


REFUSALS = {
    "encoder": (lambda: BertModel(tiny("bert")), "cannot rewire a BertModel; take a decoder of .*Wiring in a model"),
    "encoder and decoder": (lambda: T5(tiny("t5")), "T5ForConditionalGeneration: it has an encoder; take a decoder"),
    "another head": (
        lambda: LlamaForSequenceClassification(stock_config("llama", pad_token_id=0)),
        "LlamaForSequenceClassification; load it as LlamaForCausalLM or LlamaModel",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_other_models_are_refused_in_one_line(kind):
    build, message = REFUSALS[kind]
    model = build()
    for call in (lambda: rewire(model, "pre"), lambda: stock_placement(model), lambda: blocks(model)):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_an_unsupported_checkpoint_is_refused_before_its_weights_are_read(tmp_path):
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot rewire a model of type 'bert'; take a decoder"):
        load_stock(tmp_path, "pre")
    with pytest.raises(UserError, match="unknown placement"):
        load_stock(tmp_path, "prenorm")
