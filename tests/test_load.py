"""Loading a model: folders, GGUF files, Hub names, and what can be wrong with each."""

from __future__ import annotations

import importlib.util
import json
import pickle
import warnings

import pytest
import torch
from transformers import AutoConfig, BertConfig, BertLMHeadModel, T5Config

from geonorm import UserError
from geonorm.models import load_model, load_stock, rewire
from tiny_models import TEXT, save, tiny_llama, tiny_tokenizer, write_gguf

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def stock(tmp_path):
    return save(tiny_llama(), tmp_path / "stock")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def refused(source, pattern: str, **options) -> None:
    with pytest.raises(UserError, match=pattern) as caught:
        load_model(source, **options)
    assert "\n" not in str(caught.value)


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("placement", [None, "geonorm", "sandwich"])
def test_a_saved_folder_comes_back_bit_for_bit_and_silently(placement, tmp_path, capfd):
    model = tiny_llama() if placement is None else rewire(tiny_llama(), placement).eval()
    save(model, tmp_path)
    capfd.readouterr()
    loaded, tokenizer = load_model(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_dtype_and_device(stock, tmp_path):
    assert load_model(stock, dtype="bfloat16")[0].dtype == torch.bfloat16
    save(tiny_llama().to(torch.bfloat16), tmp_path / "half")
    assert load_model(tmp_path / "half")[0].dtype == torch.bfloat16
    assert load_model(tmp_path / "half", dtype=torch.float32)[0].dtype == torch.float32
    refused(stock, "`dtype` must be one of float32, bfloat16, float16, got 'int8'", dtype="int8")
    refused(stock, "device 'tpu9' cannot be used here .*; try 'cpu'", device="tpu9")


def test_gguf_gives_the_same_model_and_tokenizer_and_can_be_saved(tmp_path, capfd):
    pytest.importorskip("gguf")
    model = tiny_llama()
    path = write_gguf(model, tmp_path / "tiny.gguf")
    capfd.readouterr()
    loaded, tokenizer = load_model(path)
    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]
    loaded.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, twin = load_model(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, loaded(IDS).logits)
    assert twin(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]


def test_broken_gguf(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    data = write_gguf(tiny_llama(), tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (10, 3000, len(data) - 40):
        path.write_bytes(data[:size])
        refused(path, "cut.gguf is a broken or truncated GGUF file .*; fetch it again")
    path.write_bytes(b"<html>not found</html>")
    refused(path, "cut.gguf is not a GGUF file")
    find = importlib.util.find_spec
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with both
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest, gone=package: None if name == gone else find(name, *rest)
        )
        refused(tmp_path / "whole.gguf", rf"needs the package {package}; run pip install 'geonorm\[gguf\]'")


def test_gguf_whose_tokenizer_loses_text_is_refused(tmp_path):
    pytest.importorskip("gguf")
    # The first byte of every four-byte character: no merge has it.
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf", lost="\u00f0")
    refused(path, "the tokenizer rebuilt from the GGUF file turns .In 1984, .* use the original model's folder")


def test_nothing_of_that_name(tmp_path):
    refused(tmp_path / "gone", "no such model: .*gone is no file or folder here and no Hub name")
    refused("gone.gguf", "no such model: gone.gguf")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "notes.txt", "is a file, but not GGUF; give the folder that holds config.json")
    refused(
        "some/model",
        "no file or folder some/model here, and as a name on the Hub: We couldn't connect to .*Check your internet",
    )


def test_broken_folders(stock, tmp_path):
    weights = (stock / "model.safetensors").read_bytes()
    (stock / "model.safetensors").write_bytes(weights[:-8])
    refused(stock, "model.safetensors is broken or truncated")
    (stock / "model.safetensors").unlink()
    refused(stock, "has a config.json but no model.safetensors")
    (stock / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    refused(stock, "part-1.safetensors is missing, though model.safetensors.index.json names it")
    (stock / "model.safetensors.index.json").write_text("[]")
    refused(stock, "is not an index of weight files")
    (stock / "model.safetensors.index.json").unlink()
    (stock / "config.json").write_text('{"model_type": "llama",')
    refused(stock, "config.json is not valid JSON")
    (stock / "config.json").write_text("{}")
    refused(stock, "names no `model_type`")
    (stock / "config.json").unlink()
    refused(stock, "has no config.json; give a folder that save_pretrained wrote")
    refused(tmp_path, "has no config.json")
    save(tiny_llama(), tmp_path / "outer" / "inner")
    refused(tmp_path / "outer", "has no config.json; did you mean .*inner")
    (tmp_path / "outer" / "x.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "outer", "for the GGUF file in it, give the file")


def test_pickled_weights_are_refused_and_never_opened(stock):
    class Bomb:
        def __reduce__(self):
            return (open, (str(stock / "ran"), "w"))

    (stock / "model.safetensors").unlink()
    (stock / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(stock, r"holds its weights as a pickle \(pytorch_model.bin\).*convert it with AutoModelForCausalLM")
    assert not (stock / "ran").exists()


def test_configuration_and_weights_of_different_models(stock):
    edit_config(stock, num_hidden_layers=4)
    refused(stock, "9 weights that config.json calls for are not there, the first model.layers.3")
    edit_config(stock, num_hidden_layers=3, intermediate_size=40)
    refused(stock, "9 weights that config.json calls for have another shape, the first model.layers.0")
    edit_config(stock, intermediate_size="many")
    refused(stock, "the configuration cannot be used")
    edit_config(stock, num_hidden_layers=2, intermediate_size=48)
    with pytest.warns(UserWarning, match="9 weights have no place in the model and are left out"):
        load_model(stock)


def test_architectures_that_are_no_decoders(stock, tmp_path):
    edit_config(stock, model_type="made_up")
    refused(stock, "model type `made_up` but Transformers does not recognize this architecture")
    edit_config(stock, auto_map={"AutoConfig": "code.Config"})
    (stock / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(stock, "contains custom code .*runs no code that comes with a model")
    assert not (tmp_path / "ran").exists()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    save(BertLMHeadModel(BertConfig(**small, vocab_size=300)), tmp_path / "bert")
    refused(tmp_path / "bert", "is an encoder .bert., which predicts no next token; give a decoder")
    T5Config().save_pretrained(stock)
    refused(stock, "is an encoder-decoder .t5.; give a decoder")
    AutoConfig.for_model("vit").save_pretrained(stock)
    refused(stock, "unsupported architecture vit, which has no language-model head")


def test_tokenizer_that_is_missing_or_broken(stock):
    (stock / "tokenizer.json").write_text("{}")
    refused(stock, "the tokenizer cannot be loaded .*; copy tokenizer.json")
    (stock / "tokenizer.json").unlink()
    refused(stock, "has no tokenizer; copy tokenizer.json and tokenizer_config.json")


def test_loading_leaves_the_switches_of_transformers_as_they_were(stock):
    from transformers.utils import logging

    before = (logging.is_progress_bar_enabled(), logging.get_verbosity())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(stock)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before


def test_load_stock_refuses_what_load_model_refuses(stock, tmp_path):
    def not_taken(source, pattern: str) -> None:
        with pytest.raises(UserError, match=pattern) as caught:
            load_stock(source, "geonorm")
        assert "\n" not in str(caught.value)

    not_taken(tmp_path / "gone", "no such model")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    not_taken(tmp_path / "x.gguf", "x.gguf is a GGUF file; read it with load_model and give the model")
    # Weights that are not there are no weights kept.
    edit_config(stock, num_hidden_layers=4)
    not_taken(stock, "9 weights that config.json calls for are not there, the first model.layers.3")
    edit_config(stock, num_hidden_layers=3, intermediate_size=40)
    not_taken(stock, "9 weights that config.json calls for have another shape, the first model.layers.0")
    edit_config(stock, intermediate_size="many")
    not_taken(stock, "the configuration cannot be used")
    edit_config(stock, intermediate_size=48)
    (stock / "model.safetensors").write_bytes((stock / "model.safetensors").read_bytes()[:-8])
    not_taken(stock, "model.safetensors is broken or truncated")
    (stock / "config.json").write_text("{")
    not_taken(stock, "config.json is not valid JSON")
    (stock / "config.json").unlink()
    not_taken(stock, "has no config.json")
