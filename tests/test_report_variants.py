"""The report of a comparison that varies more than placement, rate and seed: an overview, then each variant."""

from __future__ import annotations

import re

import pytest

from geonorm.report import describe, read_results, write_report
from report_runs import LOSSES, Page, build_results, in_variants, rendered, write_run

ADAMW = {"optimizer.name": "adamw", "data.corpus": "a/b c"}
MUON = {"optimizer.name": "muon", "data.corpus": "a/b c"}


def two(muon=None, **arguments):
    return in_variants([(ADAMW, build_results()), (MUON, build_results(muon or {**LOSSES, "post": 1.4}, **arguments))])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    results = two(diverged=[("deepnorm", None, None)])
    write_run(folder, results)
    return folder, results, write_report(folder).read_text(encoding="utf-8")


def test_results_of_several_variants_are_read_as_they_were_written(page):
    folder, results, _ = page
    assert read_results(folder) == results


def test_the_overview_has_every_row_best_first_within_its_variant(page):
    _, results, html = page
    text = Page(html).text
    overview = text[text.index("All variants") : text.index("What to hold against it")]
    at = [overview.index(f"{row.test_loss_mean:.3f}", overview.index(row.variant)) for row in results.finished]
    assert at == sorted(at)
    for row in results.summary:
        if row.difference:
            low, high = row.difference.ci_corrected
            verdict = {"no difference shown": "not shown"}.get(row.verdict, row.verdict)
            assert f"{row.difference.mean:+.3f} [{low:+.3f}, {high:+.3f}] {verdict}" in overview
    assert overview.count("reference") >= 2


def test_every_variant_has_the_sections_of_a_comparison(page):
    _, results, html = page
    parsed = Page(html)
    assert parsed.open == []
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for variant in results.variants:
        # Once as the heading of its part, and in sentences and tables.
        assert len(re.findall(rf"<h2[^>]*>{re.escape(variant.name)}</h2>", html)) == 1
    for title in ("The comparison", "Learning rates", "Loss during training", "Speed and memory"):
        assert len(re.findall(f"<h3[^>]*>{title}</h3>", html)) == 2
    for title in ("What to hold against it", "To repeat it", "All trials"):
        assert len(re.findall(f"<h2[^>]*>{title}</h2>", html)) == 1
    assert "2 variants, 5 placements" in parsed.text
    assert html.count("<figcaption><b>Figure 8.</b>") == 1


def test_figures_bear_the_name_of_their_variant(page):
    folder, _, _ = page
    names = {path.name for path in (folder / "figures").glob("*.svg")}
    assert len(names) == 14
    assert "1-optimizer.name=adamw,data.corpus=a-b-c-loss-eval.svg" in names
    assert "2-optimizer.name=muon,data.corpus=a-b-c-angle-mlp.svg" in names


def test_figures_that_are_no_longer_on_the_page_are_removed(tmp_path):
    small = build_results({"pre": 1.6, "post": 1.5}, lrs=(0.004,), seeds=(0,))
    write_run(tmp_path, in_variants([(ADAMW, small), (MUON, small)]))
    write_report(tmp_path)
    assert (tmp_path / "figures" / "2-optimizer.name=muon,data.corpus=a-b-c-loss-eval.pdf").is_file()
    mine = tmp_path / "figures" / "mine.svg"
    mine.write_text("kept")
    write_run(tmp_path, small)
    write_report(tmp_path)
    names = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert {"mine.svg", "loss-eval.svg"} <= names
    assert not [name for name in names if name.startswith(("1-", "2-"))]


def test_the_terminal_prints_a_table_a_variant():
    results = two()
    text = rendered(results, 100)
    parts = [text.index(variant.name) for variant in results.variants]
    assert parts == sorted(parts)
    assert text.count("nats per token of the test text") == 2
    for row in results.finished:
        assert f"{row.test_loss_mean:.3f}" in text[text.index(row.variant) :]


def test_the_headline_counts_variants_and_sentences_name_them():
    found = describe(two())
    assert found.headline == "Better than Pre-Norm over 2 variants: GeoNorm in 2 and Post-Norm in 1"
    assert found.sentences[1] == (
        "optimizer.name=muon,data.corpus=a/b c: Post-Norm and GeoNorm are better than Pre-Norm here."
    )
    assert describe(two(lrs=(0.004,))).headline == "Better than Pre-Norm over 2 variants: GeoNorm in 1"
    untuned = in_variants([(values, build_results(lrs=(0.004,))) for values in (ADAMW, MUON)])
    assert describe(untuned).headline == "Test losses of 2 variants, without a verdict"
    alike = in_variants([(values, build_results(dict.fromkeys(LOSSES, 1.5))) for values in (ADAMW, MUON)])
    assert describe(alike).headline == "No difference to Pre-Norm is shown in any of 2 variants"
    losers = {"pre": 1.5, "geonorm": 1.7}
    worse = in_variants([(values, build_results(losers)) for values in (ADAMW, MUON)])
    assert describe(worse).headline == (
        "No placement is shown to be better than Pre-Norm in any of 2 variants; worse: GeoNorm in 2"
    )


def test_doubts_that_all_variants_share_stand_once():
    doubts = describe(two(diverged=[("deepnorm", None, None)])).doubts
    assert sum("Seed 0 chose each placement's learning rate" in doubt for doubt in doubts) == 1
    own = "optimizer.name=muon,data.corpus=a/b c: Of the 3 trials of DeepNorm, 3 diverged"
    assert next(doubt for doubt in doubts if "DeepNorm" in doubt).startswith(own)
    assert "One model size and one length of training: the ranking need not hold at another scale." in doubts


def test_a_variant_without_a_finished_trial_is_said(tmp_path):
    results = two(diverged=[(None, None, None)])
    write_run(tmp_path, results)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "No trial finished, so there is nothing to compare." in text
