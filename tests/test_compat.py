"""What geonorm relies on inside transformers and peft; a test here that fails says which of it is gone."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from geonorm.models import rewire
from tiny_models import save, tiny_llama, write_gguf

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def test_a_model_that_was_rewired_records_and_is_split_like_one_that_was_made_so(tmp_path):
    model = rewire(tiny_llama(), "geonorm")
    again = AutoModelForCausalLM.from_pretrained(save(model, tmp_path))
    for one in (model, again):
        assert len(one(IDS, output_hidden_states=True).hidden_states) == 4
        assert set(one._no_split_modules) == {"GeonormLlamaDecoderLayer"}


def test_weights_that_were_read_are_not_drawn_anew(tmp_path):
    model = rewire(tiny_llama(), "geonorm")
    path = save(model, tmp_path) / "model.safetensors"
    weights = load_file(path)
    lost = "model.layers.1.mlp.up_proj.weight"
    del weights[lost]
    save_file(weights, path, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]) == (name != lost), name


def test_a_new_norm_does_not_count_as_read(tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(save(tiny_llama(), tmp_path))
    block = rewire(loaded, "sandwich").model.layers[0]
    marked = {name for name, module in block.named_modules() if "_is_hf_initialized" in vars(module)}
    assert "attention_output_norm" not in marked
    assert "input_layernorm" in marked


def test_reading_gguf_has_one_bar_to_switch_off_and_leaves_no_mark_of_quantisation(tmp_path):
    pytest.importorskip("gguf")
    from geonorm.models import load_model

    assert hasattr(importlib.import_module("transformers.modeling_gguf_pytorch_utils"), "tqdm")
    model, _ = load_model(write_gguf(tiny_llama(), tmp_path / "tiny.gguf"))
    assert getattr(model.config, "quantization_config", None) is None
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "saved")


def test_peft_has_tables_by_model_type():
    constants = importlib.import_module("peft.utils.constants") if importlib.util.find_spec("peft") else None
    if constants is None:
        pytest.skip("peft is not installed")
    import geonorm.models  # noqa: F401

    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert table["geonorm_llama"] == table["llama"]
