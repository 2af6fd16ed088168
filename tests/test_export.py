"""From a run to a Hugging Face folder, and on from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from geonorm import UserError
from geonorm.cli import main
from geonorm.training import evaluate
from geonorm.training.export import export
from geonorm.training.run import run
from train_runs import rows, tensors, tiny, tiny_corpus

CHANGES = ("model.options.learnable=true", "model.tie_embeddings=true", "model.num_kv_heads=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run(tiny(corpus, *CHANGES), out) == 0
    return out


def test_the_export_has_the_weights_the_loss_and_the_tokenizer(corpus, trained, tmp_path, capsys):
    assert main(["export", str(trained), "--out", str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "step 30 of " in said.out
    assert said.err == ""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = tensors(trained, 30)
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in model.named_parameters())
    windows = corpus.held_out("val", 40, 6).ids
    again = evaluate(model, windows, corpus.token_bytes, batch=16, precision="fp32")
    assert again.loss == rows(trained, "eval")[-1]["val_loss"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token_id == model.config.eos_token_id == corpus.eos_id
    assert tokenizer.model_max_length == 40
    ids = tokenizer("Ada sees a boat.", return_tensors="pt")
    assert tokenizer.decode(ids.input_ids[0]) == "Ada sees a boat."
    out = model.generate(**{k: v for k, v in ids.items() if k != "token_type_ids"}, max_new_tokens=3, do_sample=False)
    assert out.shape[1] == ids.input_ids.shape[1] + 3
    assert {path.suffix for path in (tmp_path / "model").iterdir()} - {".md"} == {".json", ".safetensors"}


def test_another_step_and_a_damaged_newest(trained, tmp_path, capsys):
    export(trained, tmp_path / "early", step=24)
    early = AutoModelForCausalLM.from_pretrained(tmp_path / "early")
    assert torch.equal(early.lm_head.weight, tensors(trained, 24)["model.model.embed_tokens.weight"])
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (copy / "checkpoints" / "step-30" / "manifest.json").write_text("{")
    assert main(["export", str(copy), "--out", str(tmp_path / "model")]) == 0
    assert "step 24 of " in capsys.readouterr().out
    assert (copy / "checkpoints" / "step-30").is_dir()


def test_training_starts_from_an_export(corpus, trained, tmp_path):
    folder = export(trained, tmp_path / "model")
    config = tiny(corpus, f"model.start={folder}", "optimizer.lr=1e-9", "schedule.warmup=0", "steps=1")
    assert run(config, tmp_path / "on") == 0
    assert rows(tmp_path / "on", "eval")[-1]["val_loss"] == pytest.approx(
        rows(trained, "eval")[-1]["val_loss"], rel=1e-5
    )
    with pytest.raises(UserError, match="already rewired to geonorm"):
        run(tiny(corpus, f"model.start={folder}", "model.placement=pre"), tmp_path / "other")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone", "--out", "x"], "gone is not the folder of a training run"),
        (["RUN", "--out", "RUN"], "exists and is not empty"),
        (["RUN", "--out", "x", "--step", "7"], r"has no checkpoint of step 7 (it has: 24, 30)"),
    ],
)
def test_mistakes(trained, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(str(trained) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_start_that_lacks_a_weight_is_refused(corpus, trained, tmp_path):
    export(trained, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"1 weights that config.json calls for are not there, the first {name}"):
        run(tiny(corpus, f"model.start={tmp_path / 'model'}"), tmp_path / "run")
