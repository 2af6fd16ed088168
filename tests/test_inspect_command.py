"""``geonorm inspect`` from its options to the page."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest

from geonorm.cli import main
from geonorm.models import rewire
from geonorm.report.inspection_finding import describe_inspection, size
from geonorm.report.inspection_page import write_inspection
from report_runs import Page
from tiny_models import TEXT, save, tiny_llama, write_gguf


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save(tiny_llama(), folder / "stock")
    save(rewire(tiny_llama(1, num_hidden_layers=4), "geonorm", decay="sqrt", init=True), folder / "walk")
    (folder / "text.txt").write_text(TEXT * 40)
    return folder


@pytest.fixture(scope="module")
def two(models, tmp_path_factory):
    """Two models side by side with gradients: the folder and what the terminal showed."""
    import contextlib
    import io

    out = tmp_path_factory.mktemp("two") / "out"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(
            ["inspect", str(models / "stock"), str(models / "walk"), "--text", str(models / "text.txt"), "--gradients",
             "--length", "40", "--windows", "3", "--out", str(out)]
        )  # fmt: skip
    assert code == 0
    return out, shown.getvalue()


def test_the_numbers_file_holds_every_sub_layer(two):
    results = json.loads((two[0] / "inspection.json").read_text())
    stock, walk = results["models"]
    assert [len(model["sublayers"]) for model in (stock, walk)] == [6, 8]
    assert [len(model["gradient_norms"]) for model in (stock, walk)] == [3, 4]
    assert (stock["placement"], walk["placement"]) == ("pre", "geonorm")
    assert stock["tokens"] == {
        "windows": 3, "lengths": [40], "total": 120, "counted": 117, "skip_first": 1, "added_by_tokenizer": []
    }  # fmt: skip
    for row in walk["sublayers"]:
        assert row["radius"]["median"] == pytest.approx(1, abs=1e-5)
    assert results["text"]["name"] == "text.txt"
    assert set(stock["laws"]) == {"attention", "mlp", "both"}


def test_the_terminal_shows_the_numbers_within_80_columns(two):
    out, shown = two
    results = json.loads((out / "inspection.json").read_text())
    table = [line for line in shown.splitlines() if re.match(r" +\d+ +attention| {4,}MLP ", line)]
    assert len(table) == 14
    assert max(map(len, table)) <= 80
    for model in results["models"]:
        for row in model["sublayers"]:
            assert size(row["radius"]["median"]) in shown
            assert f"{row['angle']['median'] * 57.29578:.1f}" in shown
    assert "no special tokens added; the first 1 of each left out" in " ".join(shown.split())
    assert f"report: {out / 'inspection.html'}" in shown


def test_the_page_is_whole_and_needs_nothing_beside_it(two):
    html = (two[0] / "inspection.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(value.startswith("data:image/svg+xml;base64,") for name, value in page.attributes if name == "src")
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", re.sub(r"base64,[^\"]*", "", html))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    # Angle, radius, update, along, across, alpha: one panel a kind of sub-layer; the gradient has one.
    assert html.count('<img class="plot hue"') == 13
    results = json.loads((two[0] / "inspection.json").read_text())
    for model in results["models"]:
        row = model["sublayers"][-1]
        angle = f"{row['angle']['median'] * 57.29578:.1f}"
        assert f"MLP {size(row['radius']['median'])} {size(row['update']['median'])}" in page.text
        assert angle in page.text


def test_figures_are_written_and_the_same_numbers_give_the_same_bytes(two):
    out = two[0]
    names = {path.name for path in (out / "figures").iterdir()}
    assert {"angle-attention.svg", "angle-mlp.pdf", "alpha-mlp.svg", "gradient.pdf"} <= names
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    write_inspection(out, json.loads((out / "inspection.json").read_text()))
    assert {path: path.read_bytes() for path in before} == before
    stale, mine = out / "figures" / "angle.svg", out / "figures" / "mine.svg"
    for path in (stale, mine):
        path.write_text("of another inspection, or of the user")
    listed = out / "figures" / "figures.json"
    listed.write_text(json.dumps([*json.loads(listed.read_text()), "angle"]))
    write_inspection(out, json.loads((out / "inspection.json").read_text()))
    assert not stale.exists()
    assert mine.exists()
    mine.unlink()


def test_one_gguf_file_on_the_default_text(tmp_path, capsys):
    pytest.importorskip("gguf")
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    assert main(["inspect", str(path), "--windows", "1", "--length", "24", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "documentation strings of Python's standard library" in shown
    html = (tmp_path / "out" / "inspection.html").read_text(encoding="utf-8")
    assert html.count('<img class="plot hue"') == 6
    assert Page(html).open == []


def test_a_folder_that_is_there_is_not_overwritten_unasked(two, models, capsys):
    options = ["inspect", str(models / "stock"), "--text", str(models / "text.txt"), "--length", "20"]
    assert main([*options, "--out", str(two[0])]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*options, "--out", str(models), "--overwrite"]) == 2
    assert "no inspection" in capsys.readouterr().err
    assert main([*options, "--out", str(models / "text.txt")]) == 2
    assert "is or lies in a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--windows", "0"], "`windows` must be a whole number of at least 1"),
        (["--length", "2"], "`length` must be a whole number of at least 3"),
        (["--length", "300"], "`length` 300 is more than the 256 positions"),
        (["--skip-first", "-1"], "`skip_first` must be"),
        (["--text", "missing.txt"], "no such file or folder: missing.txt"),
        (["--device", "nowhere"], "nowhere"),
        (["--dtype", "float8"], "`dtype` must be one of"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(models, tmp_path, capsys, change, message):
    out = tmp_path / "out"
    options = ["inspect", str(models / "stock"), "--text", str(models / "text.txt"), "--out", str(out), *change]
    assert main(options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_model_that_is_not_there_and_one_given_twice(models, capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 2
    assert "nothing" in capsys.readouterr().err
    same = str(models / "stock")
    # A later model that cannot be loaded shows before the first one is measured.
    (tmp_path / "broken").mkdir()
    assert main(["inspect", same, str(tmp_path / "broken"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "broken has no config.json" in said.err
    assert "inspecting" not in said.out
    assert main(["inspect", same, same, "--out", str(tmp_path / "out")]) == 2
    assert "given twice" in capsys.readouterr().err


def test_names_are_as_short_as_they_can_be_and_differ(models, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(models / "stock", tmp_path / "runs" / name / "model")
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    sources = [str(tmp_path / name) for name in ("runs/a/model", "runs/b/model", "tiny.gguf")]
    words = ["--text", str(models / "text.txt"), "--length", "9", "--windows", "1", "--out", str(tmp_path / "out")]
    assert main(["inspect", *sources, *words]) == 0
    results = json.loads((tmp_path / "out" / "inspection.json").read_text())
    assert [model["name"] for model in results["models"]] == ["a/model", "b/model", "tiny"]


def test_the_command_in_the_report_repeats_the_run(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    save(tiny_llama(), models / "a b")
    options = ["--text", "text.txt", "--length", "9", "--no-special-tokens", "--gradients", "--out", str(tmp_path)]
    assert main(["inspect", "a b", "walk", *options, "--overwrite"]) == 0
    results = json.loads((tmp_path / "inspection.json").read_text())
    assert results["command"] == (
        "geonorm inspect 'a b' walk --text text.txt --length 9 --no-special-tokens --gradients "
        f"--out {shlex.quote(str(tmp_path))}"
    )
    assert {"geonorm", "torch", "transformers", "processor", "step"} <= set(results["environment"])


def test_odd_models_are_described_and_drawn(two, tmp_path):
    """Names with markup, a layer that does nothing, one layer alone, no head."""
    results = json.loads((two[0] / "inspection.json").read_text())
    model = results["models"][0]
    model["name"] = "<script>$x_1$"
    model["loss"] = None
    model["gradient_norms"] = None
    model["sublayers"] = model["sublayers"][:2]
    model["num_layers"] = 1
    for quantity in ("alpha", "alpha_normalized"):
        model["sublayers"][1][quantity] = {"q25": None, "median": None, "q75": None}
    for quantity in ("angle", "across"):
        model["sublayers"][1][quantity] = {"q25": 0.0, "median": 0.0, "q75": 0.0}
    for parts in (*model["laws"].values(), *model["alpha_laws"].values()):
        for part in parts:
            parts[part] = {"fits": [], "best": None, "num_points": 1, "num_left_out": 1}
    results["models"] = [model]
    html = write_inspection(tmp_path, results).read_text(encoding="utf-8")
    assert "<script" not in html
    assert Page(html).open == []
    assert "Too few layers" in describe_inspection(results).headline
    assert any("did not turn the stream" in doubt for doubt in describe_inspection(results).doubts)


def test_lengths_are_written_with_three_digits():
    assert [size(value) for value in (0.0, 921.4, 38.34, 0.11712, 0.0298, 1.2e-7, 3e6, -0.031, None)] == [
        "0.00", "921", "38.3", "0.117", "0.0298", "1.2e-07", "3.0e+06", "-0.0310", "-",
    ]  # fmt: skip
