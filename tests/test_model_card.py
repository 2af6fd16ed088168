"""The card that a saved model gets, and that nothing which goes wrong with it costs the weights."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from family_models import prompts, rewired_model
from geonorm.models import (
    base_model,
)
from geonorm.placements import create


def test_a_saved_model_has_a_card_and_keeps_one_of_the_users_own(tmp_path):
    from huggingface_hub import ModelCard

    model = rewired_model("gpt2", "geonorm", options={"decay": "sqrt"})
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["geonorm", "placement-geonorm", "gpt2"]
    for text in ("`geonorm(decay=sqrt)`", "| `decay` | `sqrt` |", "import geonorm", "AutoModelForCausalLM", "2 layers"):
        assert text in card.text, text
    rewired_model("gpt2", "pre").save_pretrained(tmp_path)
    assert "placement-pre" in ModelCard.load(tmp_path / "README.md").data.tags
    (tmp_path / "README.md").write_text("my own words")
    base_model(model).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"
    (tmp_path / "README.md").unlink()
    base_model(model).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag is None
    assert "AutoModel." in card.text
    assert create("geonorm").name in card.text


def unwritable(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize("block", [unwritable, pipe])
def test_a_card_that_cannot_be_written_is_a_warning_of_one_line_and_the_weights_are_saved(block, tmp_path):
    model, ids = rewired_model("gpt2", "geonorm"), prompts(1, 5)
    block(tmp_path / "README.md")
    with pytest.warns(UserWarning, match=r"saved, but its card .*README.md could not be written \(FileExis") as caught:
        model.save_pretrained(tmp_path)
    assert len([one for one in caught if "card" in str(one.message)]) == 1
    assert "\n" not in str(caught[0].message)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_whatever_goes_wrong_with_a_card_the_weights_are_there_first(tmp_path, monkeypatch):
    model, found = rewired_model("gpt2", "geonorm"), []

    def fail(content):
        found.append((tmp_path / "model.safetensors").is_file())
        raise RuntimeError("no card today\nnor tomorrow")

    monkeypatch.setattr("geonorm.models.saving.ModelCard", fail)
    with pytest.warns(UserWarning, match=r"could not be written \(RuntimeError: no card today\)$"):
        model.save_pretrained(tmp_path)
    assert found == [True]
    assert not (tmp_path / "README.md").exists()
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("text", ["Modèle à moi", "x" * 10 + "\x00"])
def test_a_text_of_the_users_own_in_any_encoding_stays(text, tmp_path, recwarn):
    own = text.encode("latin-1")
    (tmp_path / "README.md").write_bytes(own)
    rewired_model("gpt2", "geonorm").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == own
    assert (tmp_path / "model.safetensors").is_file()
    assert not [one for one in recwarn if "card" in str(one.message)]


def test_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere.md"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").symlink_to(elsewhere)
    rewired_model("gpt2", "geonorm").save_pretrained(tmp_path / "model")
    assert not elsewhere.exists()
    assert (tmp_path / "model" / "model.safetensors").is_file()
