"""The report: what the page and its figures hold equals what the results hold."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from geonorm.errors import UserError
from geonorm.report import style, write_report
from geonorm.report.results import write_results
from geonorm.report.series import load_series, read_metrics, running_mean
from report_runs import Page, build_results, report, with_trials, write_run


def test_numbers_on_the_page_are_those_of_the_results(full):
    _, results, html = full
    text = Page(html).text
    for row in results.finished:
        low, high = row.test_loss_ci
        assert f"{row.test_loss_mean:.3f} [{low:.3f}, {high:.3f}] {row.test_bits_per_byte_mean:.3f}" in text
        if row.difference:
            low, high = row.difference.ci_corrected
            assert f"{row.difference.mean:+.3f} [{low:+.3f}, {high:+.3f}]" in text
    for trial in results.trials:
        if trial.status == "ok":
            assert f"{trial.test_loss:.3f} {trial.val_loss:.3f} {trial.train_loss:.3f}" in text
    for value in (results.command, "9f2c41d07ab3", "2.13.0+cpu", "0.9, 0.95", "8,100,000"):
        assert value in text


def test_the_facts_name_model_text_and_training(full):
    text = Page(full[2]).text
    assert "1.80 M parameters, llama, 8 layers, hidden size 128, 4 heads, sequence length 128" in text
    assert "500 steps, 1.02 M tokens, 0.26 passes over the text, adamw, cosine schedule, float32" in text
    assert "5 placements, 3 learning rates, 3 reporting seeds, 27 trials" in text


@pytest.mark.parametrize(("compiled", "words"), [(False, "in eager mode"), (True, "under torch.compile")])
def test_beside_speeds_stands_what_they_compare(tmp_path, compiled, words):
    results = with_trials(build_results(), lambda *_: {"step_impl": "cpp"})
    results = dataclasses.replace(results, settings={**results.settings, "compile": compiled})
    said = f"Tokens/s compares placements {words}: GeoNorm's step by its implementation cpp, the norms of all"
    # Under the ranking and under the table of speeds.
    assert report(tmp_path, results).count(said) == 2


def test_the_page_says_what_was_held_out_and_how_the_rates_were_found(full):
    text = Page(full[2]).text
    assert "130 documents, 410 k tokens, largest share 8 %, 0.4 % in 32-grams of the training text" in text
    assert "128 documents, 91 groups, 402 k tokens, largest share 11 %, 2.3 % in 32-grams" in text
    assert "Seed 0 chose each placement's learning rate by the validation text" in text
    assert "seeds that report, on the test text: 1, 2 and 3" in text
    assert "pre 0.004 0.00283, 0.004, 0.00566 yes" in text
    assert "deepnorm - 0.00283, 0.004, 0.00566 no" in text
    assert "2.3 % of the test tokens lie in a run of 32 tokens that is in the training text too" in text


def test_rows_are_lowest_first_and_unfinished_last(full):
    _, results, html = full
    ranking = html[html.index('class="ranking"') :]
    names = re.findall(r'<span class="name hue"[^>]*>(\w+)</span>', ranking[: ranking.index("</table>")])
    assert names == [row.placement for row in results.summary]
    assert names[0] == "geonorm"
    assert names[-1] == "deepnorm"


def test_page_is_well_formed_and_self_contained(full):
    html = full[2]
    page = Page(html)
    assert page.open == []
    assert html.startswith("<!doctype html>")
    assert ("lang", "en") in page.attributes
    assert any(name == "content" and value.startswith("width=device-width") for name, value in page.attributes)
    assert not {"script", "link", "iframe", "object", "image"} & set(page.tags)
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert references
    assert all(value.startswith("data:image/svg+xml;base64,") for value in references)
    # A picture inside an image can name what it likes; nothing else may.
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", re.sub(r"base64,[^\"]*", "", html))


def test_ids_are_unique_and_references_resolve(full):
    page = Page(full[2])
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for name, value in page.attributes if name == "href"}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", full[2]))
    wanted |= {value for name, value in page.attributes if name in ("aria-labelledby", "aria-describedby")}
    assert wanted <= set(ids)


def test_figures_have_labels_and_captions_and_follow_the_dark_scheme(full):
    html = full[2]
    plots = re.findall(r'<img class="plot hue"[^>]*>', html)
    assert len(plots) == 7
    assert all(re.search(r'alt="[^"]{30,}"', plot) for plot in plots)
    assert html.count("<figcaption>") == html.count("<figure") == 4
    dark = html[html.index("prefers-color-scheme: dark") :]
    assert ".hue { filter: invert(1) hue-rotate(180deg); }" in dark
    # Whatever is drawn in the colour of a placement turns with the scheme.
    coloured = re.findall(r"<[^>]*#[0-9a-f]{6}[^>]*>", html[html.index("</style>") :])
    assert coloured
    assert all("hue" in tag for tag in coloured)


@pytest.mark.parametrize("colour", style.COLOURS)
def test_names_can_be_read_in_both_schemes(colour):
    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.05 + np.dot([0.2126, 0.7152, 0.0722], linear)

    def parse(text):
        return np.array([int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)])

    # What CSS makes of invert(1) hue-rotate(180deg).
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    turned = np.clip(turn @ (1 - parse(colour)), 0, 1)
    assert luminance(parse(style.PAPER)) / luminance(parse(colour)) >= 4.5
    assert luminance(turned) / luminance(parse("#161615")) >= 4.5


def test_files_for_a_paper_are_written_and_repeat_byte_for_byte(full):
    folder, _, html = full
    names = {path.name for path in (folder / "figures").iterdir()} - {"figures.json"}
    stems = (
        "loss-eval",
        "loss-train",
        "learning-rate",
        "gradient-start",
        "gradient-end",
        "angle-attention",
        "angle-mlp",
    )
    assert names == {stem + ending for stem in stems for ending in (".svg", ".pdf")}
    before = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert before["loss-eval.pdf"].startswith(b"%PDF")
    assert write_report(folder).read_text(encoding="utf-8") == html
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == before


def test_figures_do_not_depend_on_the_users_matplotlib_settings(full):
    import matplotlib

    folder, _, html = full
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        assert write_report(folder).read_text(encoding="utf-8") == html


def test_truncated_and_missing_metrics_are_told(full):
    text = Page(full[2]).text
    assert "1 unreadable line in the metrics of trial geonorm-decay=sqrt-lr0.004-seed1" in text
    assert "Trial pre-lr0.004-seed2 has no metrics file" in text


def test_rates_that_were_not_searched_draw_no_sensitivity(tmp_path):
    assert "Sensitivity to the learning rate" not in report(tmp_path, build_results(lrs=(0.004,), seeds=(0,)))


@pytest.mark.parametrize("count", [28, 60])
def test_variants_of_one_placement_are_drawn_apart(count):
    looks = style.looks(["geonorm"] * count)
    assert len({(look.colour, look.dashes, look.marker) for look in looks}) == count
    assert len({(look.colour, look.dashes) for look in looks}) == min(count, 32)
    few = style.looks(["geonorm", "pre", "geonorm", "post"])
    assert [look.colour for look in few] == [
        style.PLACEMENTS[name][0] for name in ("geonorm", "pre", "geonorm", "post")
    ]
    assert few[0] != few[2]
    # These two share a colour of those that are left over, by name.
    assert len(set(style.looks(["output", "output", "parallel", "parallel"]))) == 4


def test_page_without_any_metrics_has_no_training_figures(tmp_path):
    write_results(tmp_path, build_results())
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert html.count('<img class="plot') == 1  # the learning rates come from the results
    assert "Loss during training" not in html


def test_read_metrics_skips_bad_lines_and_keeps_the_later_of_two_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = ['{"kind":"train","step":20,"loss":3.0}', '{"kind":"tr', '{"kind":"train","step":10,"loss":NaN}', "[1]"]
    path.write_text("\n".join([*rows, '{"kind":"train","step":20,"loss":2.5}', '{"kind":"new","step":1}']))
    metrics = read_metrics(path)
    assert metrics.skipped == 2
    assert metrics.train == {20: 2.5}
    assert not read_metrics(tmp_path / "absent").found


def test_long_logs_are_thinned_to_what_a_line_can_show(tmp_path):
    results = build_results(losses={"pre": 1.6}, lrs=(0.004,), seeds=(0,))
    write_run(tmp_path, results, steps=20_000)
    curve = load_series(tmp_path, results)[0].loss_curve("train", 5)
    assert len(curve.x) == 400
    assert curve.x[0] == 10
    assert curve.x[-1] == 20_000


def test_user_text_is_escaped_everywhere(tmp_path):
    evil = "<script>alert(1)</script>"
    results = build_results(losses={"post": 1.5, "pre": 1.6}, lrs=(0.004,))
    named = {"placement": evil, "label": evil, "options": {"x": '"><script>$\\frac'}}
    results = dataclasses.replace(
        with_trials(results, lambda _, one: {"message": evil, **(named if one.placement == "post" else {})}),
        summary=tuple(dataclasses.replace(row, **named) if row.placement == "post" else row for row in results.summary),
        corpus={**results.corpus, "name": evil},
        settings={**results.settings, "path": evil, evil: 1},
        environment={"platform": evil, "date": evil},
        command=evil,
    )
    write_run(tmp_path, results)
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in html.lower()
    assert "&lt;script&gt;" in html
    assert Page(html).open == []
    assert "<script" not in (tmp_path / "figures" / "loss-eval.svg").read_text().lower()


def test_a_damaged_folder_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"no results\.json"):
        write_report(tmp_path)
    (tmp_path / "results.json").write_text('{"trials": [')
    with pytest.raises(UserError, match="not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "results.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"results\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("corpus"), "`corpus` is missing"),
        (lambda r: r.update(trials={"a": 1}), r"`trials\[0\].status` is missing"),
        (lambda r: r["summary"][1].pop("options"), r"`summary\[1\].options` is missing"),
        (lambda r: r["trials"][0].update(id="../../etc"), r"`trials\[0\].id` must be a plain folder name"),
        (lambda r: r["trials"][2].update(lr=None), r"`trials\[2\].lr` must be a number, got None"),
        (lambda r: r["trials"][2].update(lr=-1), r"`trials\[2\].lr` must be positive, got -1"),
        (lambda r: r["trials"][3].update(test_loss="low"), r"`trials\[3\].test_loss` must be a number, got 'low'"),
        (lambda r: r["trials"][3].update(seed=0.5), r"`trials\[3\].seed` must be a whole number, got 0.5"),
        (lambda r: r["trials"][0].update(options=[]), r"`trials\[0\].options` must hold keys and values, got list"),
        (lambda r: r["summary"][0].update(test_loss_ci=[1]), r"`summary\[0\].test_loss_ci` needs 2 values"),
        (lambda r: r["summary"][0].update(lrs_tried=[None]), r"`summary\[0\].lrs_tried` must be a number, got None"),
        (lambda r: r["summary"][0].update(verdict="best"), r"`summary\[0\].verdict` must be 'better', "),
        (lambda r: r["summary"][0].update(difference=None), r"`summary\[0\].verdict` stands without `difference`"),
        (lambda r: r["variants"][0].update(reference="post(x)"), "`reference` 'post\\(x\\)' is the label of no row"),
        (
            lambda r: r["summary"][1].update(no_verdict=["bad luck"]),
            r"`summary\[1\].no_verdict` has the unknown reason",
        ),
        (lambda r: r["summary"][1].update(variant="x=1"), r"`summary\[1\].variant` 'x=1' is the name of no variant"),
        (lambda r: r.update(variants=[]), "`variants` is empty"),
        (lambda r: r.pop("format"), "another version of geonorm .*; run the comparison again into another folder"),
    ],
)
def test_an_edited_value_is_named_with_its_file_and_what_was_expected(tmp_path, change, message):
    results = dataclasses.asdict(build_results())
    assert results["summary"][0]["verdict"]
    change(results)
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match=message) as error:
        write_report(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "results.json"))
    assert "\n" not in str(error.value)


def test_edited_settings_and_metrics_do_not_end_in_a_traceback(tmp_path):
    results = build_results(lrs=(0.004,))
    results = dataclasses.replace(
        results, corpus=dict.fromkeys(results.corpus, "many"), settings={"steps": "many", "model.hidden_size": [1]}
    )
    write_run(tmp_path, results)
    path = tmp_path / "trials" / results.trials[0].id / "metrics.jsonl"
    odd = ['{"kind":"eval","step":1,"val_loss":"x"}', '{"kind":"layers","step":1,"grad_norm":[1,"x"],"angle":[]}']
    path.write_text("\n".join([*odd, path.read_text()]))
    write_report(tmp_path)


def test_rows_that_are_equal_to_the_bit_have_a_page(tmp_path):
    results = build_results(losses={"pre": 1.5, "post": 1.5}, lrs=(0.004,))
    equal = {"mean": 0.0, "ci": (0.0, 0.0), "ci_corrected": (0.0, 0.0)}
    rows = [
        dataclasses.replace(
            row, test_loss_mean=1.5, difference=row.difference and dataclasses.replace(row.difference, **equal)
        )
        for row in results.summary
    ]
    results = with_trials(results, lambda *_: {"test_loss": 1.5, "val_loss": 1.5})
    assert "0.000 [0.000, 0.000]" in report(tmp_path, dataclasses.replace(results, summary=tuple(rows)))


def test_a_name_that_matplotlib_would_leave_out_of_a_legend_is_in_it(tmp_path):
    from matplotlib.figure import Figure

    from geonorm.report.plots import add_legend, label_of

    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], [1, 2], label=label_of("_mine"))
    axes.plot([1, 2], [3, 4], label=label_of("$x"))
    add_legend(figure, axes)
    # In the order in which they end, the highest first.
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["$x", " _mine"]


def test_running_mean_equals_direct_average():
    values = np.random.default_rng(0).normal(size=20)
    smooth = running_mean(values, 5)
    assert smooth[10] == pytest.approx(values[8:13].mean())
    assert smooth[1] == pytest.approx(values[0:3].mean())
    assert smooth[0] == pytest.approx(values[0])
    assert smooth[-1] == pytest.approx(values[-1])
