"""A tokenizer with a token more than its model has embeddings, as Gemma 3's: read as stock transformers does."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from geonorm import UserError
from geonorm.cli import main
from geonorm.data import prepare
from geonorm.evaluation import GenerationSettings, evaluate_tasks, generate, perplexity
from geonorm.models import load_model
from geonorm.training.run import run as train
from tiny_models import TEXT, tiny_llama, tiny_tokenizer
from train_runs import rows, tiny

MARK = "@picture@"
SAID = "has the token id 300, but the model has 300 embeddings; take that token out of the text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([MARK])
    assert len(tokenizer) == 301
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path):
    """Text without the token, and text with it."""
    for name, more in (("good", ""), ("bad", f" {MARK} ")):
        (tmp_path / name).mkdir()
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(f"Document {number}. {more}" + TEXT * 3)
    return tmp_path / "good", tmp_path / "bad"


def command(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def test_the_model_loads_and_only_text_with_the_token_is_refused(folder):
    model, tokenizer = load_model(folder)
    stock, plain = tiny_llama(), tiny_tokenizer()
    assert perplexity(model, tokenizer, [TEXT]) == perplexity(stock, plain, [TEXT])
    settings = GenerationSettings(5, temperature=0)
    assert generate(model, tokenizer, ["It was"], settings, io.StringIO()) == generate(
        stock, plain, ["It was"], settings, io.StringIO()
    )
    with pytest.raises(UserError, match=f"document 2 {SAID}"):
        perplexity(model, tokenizer, [TEXT, f"a {MARK} b"])
    with pytest.raises(UserError, match=f"the prompt {SAID}"):
        generate(model, tokenizer, [f"a {MARK}"], settings, io.StringIO())


def test_padding_that_the_model_cannot_read_is_not_given_to_it(folder):
    model, tokenizer = load_model(folder)
    tokenizer.pad_token = MARK
    settings = GenerationSettings(8, temperature=0, num_beams=4)
    assert generate(model, tokenizer, ["It was"], settings, io.StringIO()) == generate(
        tiny_llama(), tiny_tokenizer(), ["It was"], settings, io.StringIO()
    )


def test_commands(folder, texts, tmp_path, capsys):
    good, bad = texts
    sizes = ["--windows", 4, "--length", 32]
    commands = {
        "eval": lambda text: ["eval", folder, "--text", text],
        "generate": lambda text: ["generate", folder, "--prompt", (text / "0.txt").read_text()[:40]],
        "inspect": lambda text: ["inspect", folder, "--text", text, *sizes, "--out", tmp_path / f"i-{text.name}"],
        "convert": lambda text: [
            "convert", folder, "--text", text, *sizes, "--eval-windows", 3, "--out", tmp_path / f"c-{text.name}",
        ],
    }  # fmt: skip
    for name, line in commands.items():
        code, error = command(capsys, *line(good))
        assert code == 0, (name, error)
        code, error = command(capsys, *line(bad))
        assert code == 2, name
        assert "token id 300" in error, name
        assert error.count("\n") == 1, (name, error)
    assert not (tmp_path / "c-bad").exists()


def test_tasks(folder, tmp_path):
    pytest.importorskip("lm_eval")
    model, tokenizer = load_model(folder)
    tokenizer.pad_token = MARK
    for name, last in (("good", "b"), ("bad", MARK)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"q": "It was", "c": ["a", last], "a": 0}) + "\n")
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / name}.jsonl}}}}\n"
            "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: c\n"
            "doc_to_target: a\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
        )
    assert evaluate_tasks(model, tokenizer, ["good"], include_path=[tmp_path])[0]["metric"] == "acc"
    assert tokenizer.pad_token == MARK
    # The token is the last of its line, so that the model never reads it but is asked for its probability.
    with pytest.raises(UserError, match=f"a question of the tasks {SAID}"):
        evaluate_tasks(model, tokenizer, ["bad"], include_path=[tmp_path])


def test_training_from_such_a_model(folder, texts, tmp_path):
    good, bad = (
        prepare([text], tokenizer=folder, out=tmp_path / f"{text.name}-corpus", min_documents=1) for text in texts
    )
    start = [f"model.start={folder}", "model.placement=geonorm", "steps=2", "schedule.warmup=1", "evaluation.every=2"]
    assert good.vocab_size == 301
    assert train(tiny(good, *start), tmp_path / "run") == 0
    assert len(rows(tmp_path / "run")) == 2
    assert np.isfinite(rows(tmp_path / "run", "eval")[-1]["val_loss"])
    with pytest.raises(UserError, match=f"the train side of the corpus .* {SAID}"):
        train(tiny(bad, *start), tmp_path / "other")
    sampling = [*start, "sampling.every=1", f"sampling.prompts=['a {MARK}']"]
    with pytest.raises(UserError, match=f"the prompt .* {SAID}"):
        train(tiny(good, *sampling), tmp_path / "third")
    # What was trained is exported with the same tokenizer and loads again.
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    model, tokenizer = load_model(tmp_path / "exported")
    assert len(tokenizer) == 301
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(ids).logits, model(ids).logits)
