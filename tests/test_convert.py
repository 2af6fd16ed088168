"""Trained Pre-Norm models converted to GeoNorm: gains folded, angles kept, saved and loaded."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from family_models import FAMILIES, prompts, stock_model
from geonorm import UserError
from geonorm.cli import main
from geonorm.cli.convert_command import Convert
from geonorm.conversion import convert_model
from geonorm.conversion.calibrate import measured_moves
from geonorm.conversion.fold import fold, input_norms, without_gains
from geonorm.models import load_model, rewire
from geonorm.models.rewiring import as_rewired
from geonorm.placements import unit_rms
from tiny_models import TEXT, save, tiny_llama

IDS = torch.randint(0, 280, (4, 24), generator=torch.Generator().manual_seed(0))


def test_folding_alone_changes_nothing():
    model = tiny_llama(rms_norm_eps=1e-3)
    before = model(IDS).logits
    view = as_rewired(model)
    norms = input_norms(view, IDS)
    assert len(norms) == 6
    assert {len(entry.readers) for (_, sublayer), entry in norms.items() if sublayer == "attention"} == {3}
    assert {len(entry.readers) for (_, sublayer), entry in norms.items() if sublayer == "mlp"} == {2}
    fold(norms)
    assert not torch.allclose(model(IDS).logits, before, atol=1e-2)
    with without_gains(norms):
        torch.testing.assert_close(view(IDS).logits, before, rtol=1e-4, atol=1e-5)


def test_a_sub_layer_of_the_converted_model_is_that_of_the_stock_model_on_the_same_direction():
    stock = tiny_llama(rms_norm_eps=1e-12)
    converted = copy.deepcopy(stock)
    convert_model(converted, IDS)
    x = 7.3 * torch.randn(5, 32)
    block, twin = stock.model.layers[1], converted.model.layers[1]
    torch.testing.assert_close(twin.mlp(unit_rms(x)), block.mlp(block.post_attention_layernorm(x)))
    # The eps takes a part away that depends on the length of x; folded is its median over the tokens seen.
    rough = tiny_llama(rms_norm_eps=0.5)
    shrink = input_norms(as_rewired(rough), IDS)[1, "attention"].shrink
    rows = rough.model.embed_tokens(IDS).square().mean(-1)
    assert shrink == pytest.approx((rows / (rows + 0.5)).sqrt().median().item(), rel=1e-4)
    assert shrink < 0.5


@pytest.mark.parametrize("retraction", ["exponential", "projection", 3.0])
def test_sequential_calibration_keeps_every_median_angle(retraction):
    stock = tiny_llama()
    wanted = measured_moves(as_rewired(stock), IDS)
    converted = copy.deepcopy(stock)
    found = convert_model(converted, IDS, retraction=retraction)
    got = measured_moves(converted, IDS)
    assert list(got) == list(wanted) == [(entry.layer, entry.sublayer) for entry in found.sublayers]
    for key, (angle, _) in wanted.items():
        assert got[key][0] == pytest.approx(angle, rel=1e-4)
    assert converted.config.placement_options["alphas"] == found.alphas
    assert converted.config.placement_options["max_angle"] is None


def test_calibration_on_the_stock_activations_divides_its_own_medians():
    stock = tiny_llama()
    moves = measured_moves(as_rewired(stock), IDS)
    found = convert_model(copy.deepcopy(stock), IDS, method="stock", retraction="exponential")
    assert found.alphas == pytest.approx([angle / across for angle, across in moves.values()])
    first = found.sublayers[0]
    assert first.alpha == pytest.approx(
        convert_model(copy.deepcopy(stock), IDS, retraction="exponential").alphas[0], rel=1e-4
    )


def test_the_angle_of_pre_norm_is_measured_by_its_formula():
    stock = tiny_llama(num_hidden_layers=1)
    x = stock.model.embed_tokens(IDS)
    block = stock.model.layers[0]
    rotary = stock.model.rotary_emb(x, torch.arange(24)[None])
    u = block.self_attn(block.input_layernorm(x), position_embeddings=rotary, attention_mask=None)[0]
    r, along = x.norm(dim=-1), (u * x).sum(-1) / x.norm(dim=-1)
    across = (u.square().sum(-1) - along.square()).sqrt()
    angle, rms = measured_moves(as_rewired(stock), IDS)[1, "attention"]
    assert angle == pytest.approx(torch.atan2(across, r + along)[:, 1:].median().item(), rel=1e-4)
    assert rms == pytest.approx(across[:, 1:].median().item() / math.sqrt(32), rel=1e-4)


def test_a_converted_model_trains_saves_and_loads(tmp_path):
    model = tiny_llama()
    convert_model(model, IDS, learnable=True)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.config.placement_options == model.config.placement_options


REFUSED = {
    "gpt2": "LayerNorm: it takes the mean away or adds a bias",
    "gpt_neox": "it is wired as 'parallel'; convert one wired as 'pre'",
    "gpt_neox sequential": "LayerNorm: it takes the mean away or adds a bias",
    "gemma2": "it is wired as 'sandwich'",
    "gemma3_text": "it is wired as 'sandwich'",
    "olmo2": "it is wired as 'output'",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_converted_or_refused_for_a_reason(family):
    stock = stock_model(family)
    ids = prompts(4, 16)
    if family in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family]):
            convert_model(stock, ids)
        return
    wanted = measured_moves(as_rewired(stock), ids)
    assert convert_model(stock, ids, retraction="exponential").fold_error < 1e-4
    for key, (angle, _) in measured_moves(stock, ids).items():
        assert angle == pytest.approx(wanted[key][0], rel=1e-3)


def test_what_cannot_be_converted():
    with pytest.raises(UserError, match="rewired to 'geonorm' already; convert the stock model"):
        convert_model(rewire(tiny_llama(), "geonorm"), IDS)
    with pytest.raises(UserError, match="unknown calibration method 'seqential'; did you mean 'sequential'"):
        convert_model(tiny_llama(), IDS, method="seqential")
    with pytest.raises(UserError, match="windows of at least 2 tokens"):
        convert_model(tiny_llama(), IDS[:, :1])
    still = tiny_llama()
    torch.nn.init.zeros_(still.model.layers[1].mlp.down_proj.weight)
    with pytest.raises(UserError, match="mlp 2 moves nothing on the calibration text"):
        convert_model(still, IDS)


def test_a_norm_that_is_read_by_something_unknown_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, torch.nn.Parameter(torch.ones(32))

        def forward(self, h):
            return self.inner(h * self.weight)

    model = tiny_llama()
    model.model.layers[0].mlp = Odd(model.model.layers[0].mlp)
    with pytest.raises(UserError, match="the norm before mlp 1 is read by Odd"):
        convert_model(model, IDS)

    class Hidden(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, h):
            return self.inner(h) + h.tanh()

    model = tiny_llama()
    model.model.layers[0].mlp = Hidden(model.model.layers[0].mlp)
    with pytest.raises(UserError, match="something reads a norm that was not found"):
        convert_model(model, IDS)


# --- command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"Document {number}. " + TEXT * 3)
    return folder


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def test_the_command_converts_measures_and_saves(text, tmp_path, capsys):
    stock = save(tiny_llama(), tmp_path / "stock")
    out = tmp_path / "out"
    options = ["--windows", 4, "--eval-windows", 3, "--length", 32]
    assert run("convert", stock, "--out", out, "--text", text, *options) == 0
    said = capsys.readouterr().out
    record = json.loads((out / "conversion.json").read_text())
    assert f"{record['loss_before']:.4f} before, {record['loss_after']:.4f} after" in said
    assert f"{record['loss_after']:.4f} after" in (out / "README.md").read_text()
    model, _ = load_model(out)
    assert model.config.placement == "geonorm"
    assert model.config.placement_options["alphas"] == [entry["alpha"] for entry in record["sublayers"]]
    assert record["chance"] == pytest.approx(math.log(model.config.vocab_size))
    # Again into the same folder: refused, and nothing is lost.
    assert run("convert", stock, "--out", out, "--text", text, *options) == 2
    assert "exists and is not empty; give a new folder" in capsys.readouterr().err
    assert (out / "model.safetensors").exists()


def test_converting_to_pre_changes_no_bit(tmp_path, capsys):
    stock = save(tiny_llama(), tmp_path / "stock")
    assert run("convert", stock, "--to", "pre", "--out", tmp_path / "pre") == 0
    model, _ = load_model(tmp_path / "pre")
    assert model.config.placement == "pre"
    assert torch.equal(model(IDS).logits, load_model(stock)[0](IDS).logits)


def test_mistakes_at_the_command_line(text, tmp_path, capsys):
    stock = save(tiny_llama(), tmp_path / "stock")
    for arguments, pattern in (
        (["--to", "post"], "a trained model cannot be converted to 'post'"),
        (["--to", "geo"], "unknown placement 'geo'; did you mean 'geonorm'?"),
        (["--method", "x"], "unknown calibration method 'x'"),
        (["--text", text, "--length", 4000], "`length` 4000 is more than the 256 positions"),
        (["--text", tmp_path / "gone.txt"], "no such file or folder"),
        (["--text", text, "--length", 200], "windows of 201 tokens to hold out, but 32 are needed"),
        (["--windows", 0], "`windows` must be a whole number of at least 1"),
        (["--eval-windows", 0], "`eval_windows` must be a whole number of at least 1"),
    ):
        assert run("convert", stock, "--out", tmp_path / "out", *arguments) == 2
        assert pattern in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    assert run("convert", stock, "--to", "pre", "--out", tmp_path / "file" / "out") == 2
    assert "is or lies in a file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["here", "link", "beside a folder named partial"])
def test_the_folder_may_be_there_and_nothing_beside_it_is_touched(kind, tmp_path, capsys, monkeypatch):
    stock, out = save(tiny_llama(), tmp_path / "stock"), tmp_path / "out"
    beside = tmp_path / "out.partial"
    beside.mkdir()
    (beside / "mine").write_text("x")
    given = out
    if kind == "here":
        out.mkdir()
        monkeypatch.chdir(out)
        given = "."
    elif kind == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    assert run("convert", stock, "--to", "pre", "--out", given) == 0
    assert load_model(out)[0].config.placement == "pre"
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    assert not list(out.glob("partial-*"))
    assert (beside / "mine").exists()


def test_a_card_that_fails_costs_no_conversion(tmp_path, monkeypatch):
    def fail(content):
        raise OSError(28, "No space left on device")

    stock = save(tiny_llama(), tmp_path / "stock")
    monkeypatch.setattr("geonorm.models.saving.ModelCard", fail)
    with pytest.warns(UserWarning, match="its card .*README.md could not be written"):
        assert run("convert", stock, "--to", "pre", "--out", tmp_path / "pre") == 0
    assert torch.equal(load_model(tmp_path / "pre")[0](IDS).logits, load_model(stock)[0](IDS).logits)


def test_options_of_other_libraries_are_recorded_as_plain_ones(text, tmp_path):
    stock = save(tiny_llama(), tmp_path / "stock")
    options = Convert(
        str(stock),
        tmp_path / "out",
        text=(text,),
        max_angle=np.float32(1.5),
        learnable=np.bool_(True),
        windows=np.int64(4),
        eval_windows=3,
        length=32,
    )
    assert options.run() == 0
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    settings = record["settings"]
    assert (settings["max_angle"], settings["learnable"], settings["windows"]) == (1.5, True, 4)
    options = load_model(tmp_path / "out")[0].config.placement_options
    assert (options["max_angle"], options["learnable"]) == (1.5, True)
    assert options["alphas"] == [entry["alpha"] for entry in record["sublayers"]]
