"""The report: its sentences and its table in the terminal."""

from __future__ import annotations

from geonorm.report.finding import describe
from geonorm.report.format import prose_name, short_labels
from report_runs import (
    LOSSES,
    build_results,
    rendered,
    report,
)


def test_finding_when_geonorm_wins(full):
    _, results, _ = full
    finding = describe(results)
    gap = next(row for row in results["summary"] if row["placement"] == "geonorm")["difference"]
    assert finding.headline == f"GeoNorm ends {-gap['mean']:.3f} nats below Pre-Norm"
    assert "excludes zero" in " ".join(finding.sentences)
    assert any("DeepNorm, 6 diverged" in doubt and "none finished" in doubt for doubt in finding.doubts)
    assert any("SandwichNorm, 1 failed (learning rate 0.002)" in doubt for doubt in finding.doubts)


def test_finding_says_when_geonorm_does_not_win(tmp_path):
    results = build_results({**LOSSES, "geonorm": 1.62, "post": 1.5})
    finding = describe(results)
    assert finding.headline.endswith("GeoNorm does not win")
    assert "GeoNorm does not win: GeoNorm (decay=sqrt) is" in " ".join(finding.sentences)
    results = build_results({"pre": 1.5, "post": 1.6, "geonorm": 1.7})
    assert describe(results).headline == "No placement ends below Pre-Norm here"
    assert "GeoNorm does not win" in report(tmp_path, results)


def test_a_lead_over_the_runner_up_that_is_noise_is_told():
    results = build_results({**LOSSES, "deepnorm": 1.575})
    results["summary"][1]["behind_best"] = {
        "reference": "geonorm",
        "mean": 0.04,
        "ci": [-0.01, 0.09],
        "kind": "paired seeds",
    }
    assert results["summary"][1]["placement"] == "deepnorm"
    finding = describe(results)
    assert "but not clearly below DeepNorm" in finding.headline
    assert "includes zero, so this run does not tell it from GeoNorm" in " ".join(finding.sentences)
    results["summary"][1]["behind_best"]["ci"] = [0.01, 0.07]
    assert "not clearly" not in describe(results).headline


def test_a_normalised_entry_is_said_in_words():
    results = build_results(options={"pre": {"normalize_entry": True}, "geonorm": {"decay": "sqrt", "alpha": 2.0}})
    rows = [*results["summary"], {**results["summary"][0], "placement": "pre", "options": {}}]
    names = {prose_name(row, rows) for row in rows}
    assert "Pre-Norm with a normalised entry" in names
    assert "Pre-Norm" in names


def test_finding_does_not_call_noise_a_win():
    results = build_results(lrs=(0.004,))
    row = results["summary"][0]
    row["difference"]["ci"] = [-0.05, 0.01]
    finding = describe(results)
    assert "within the noise" in finding.headline
    assert "includes zero" in " ".join(finding.sentences)


def test_edge_of_the_grid_is_not_settled(tmp_path):
    results = build_results(lrs=(0.004, 0.008))
    text = report(tmp_path, results)
    assert "the comparison is not settled for them" in text
    assert "lowest learning rate tried, 0.004" in text
    assert "lr at edge of grid" in text


def test_windows_interval_is_told_apart_from_seeds(tmp_path):
    text = report(tmp_path, build_results(lrs=(0.004,), seeds=(0,)))
    assert "do not contain the variation from seed to seed" in text
    assert "nats below Pre-Norm, on one seed each" in text
    assert "Only one learning rate was tried" in text
    assert "Sensitivity to the learning rate" not in text
    assert "edge" not in text


def test_no_finished_trial(tmp_path):
    results = build_results(diverged=[(None, None, None)])
    for trial in results["trials"]:
        trial["peak_memory_bytes"] = None
    text = report(tmp_path, results)
    assert "No trial finished, so there is nothing to compare" in text
    assert "loss was not finite at step 180" in text
    assert "None" not in text
    assert "nan" not in text


def test_reference_without_finished_trial(tmp_path):
    text = report(tmp_path, build_results(failed=[("pre", None, None)]))
    assert "Pre-Norm has no finished trial, so there is no difference to it" in text


def test_single_finished_placement():
    assert describe(build_results(failed=[("pre", None, None)], losses={"pre": 1.6, "post": 1.5})).headline.startswith(
        "Only Post-Norm finished"
    )


def test_nulls_are_dashes(tmp_path):
    results = build_results()
    for trial in results["trials"]:
        trial |= {"tokens_per_second": None, "peak_memory_bytes": None, "train_loss": None, "seconds": None}
    for row in results["summary"]:
        row |= {"val_loss_ci": None, "difference": None, "val_bits_per_byte_mean": None}
    text = report(tmp_path, results)
    assert "None" not in text
    assert "Speed and memory" not in text


def test_terminal_table_fits_80_columns_and_holds_every_number(full):
    results = full[1]
    text = rendered(results)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    order = [line.split()[0] for line in lines if line.strip() and line.split()[0] in LOSSES]
    assert order == [row["placement"] for row in results["summary"]]
    for row in results["summary"]:
        if row["val_loss_mean"] is not None:
            assert f"{row['val_loss_mean']:.3f}" in text
            assert "[{:.3f}, {:.3f}]".format(*row["val_loss_ci"]) in text
            if row["difference"]:
                assert "[{:+.3f}, {:+.3f}]".format(*row["difference"]["ci"]) in text
    assert "seeds" in text
    assert "6 of 6 trials diverged" in rendered(results, 120)


def test_labels_keep_only_the_options_that_differ():
    def row(placement, **options):
        return {"placement": placement, "options": options}

    rows = [
        row("geonorm", decay="sqrt", alpha=1.0),
        row("geonorm", decay="none", alpha=1.0),
        row("pre", x=1),
        row("post"),
    ]
    assert short_labels(rows) == ["geonorm sqrt", "geonorm none", "pre", "post"]
    rows = [
        row("pre"),
        row("pre", normalize_entry=True),
        row("geonorm", max_angle=0.785),
        row("geonorm", max_angle=None),
    ]
    assert short_labels(rows) == ["pre", "pre normalize_entry", "geonorm max_angle=0.785", "geonorm max_angle=none"]
