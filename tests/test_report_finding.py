"""The report: its sentences follow the verdicts, and its table in the terminal."""

from __future__ import annotations

import re

import pytest

from geonorm.report import describe, parse_results
from geonorm.report.format import prose_name, short_labels
from report_runs import DOCUMENTS, LOSSES, build_results, rendered, report


def finding(results):
    return describe(parse_results(results))


def verdicts(results):
    return {row["placement"]: row["verdict"] for row in results["summary"]}


CLAIMS = {"better", "worse", "wins", "winner", "beats", "leads"}


def claims_nothing(results) -> bool:
    found = finding(results)
    return not CLAIMS & set(re.findall(r"\w+", " ".join([found.headline, *found.sentences]).lower()))


def test_a_difference_that_is_shown_is_the_headline(full):
    _, results, _ = full
    found = finding(results)
    gap = next(row for row in results["summary"] if row["placement"] == "geonorm")["difference"]
    assert verdicts(results)["geonorm"] == "better"
    assert found.headline == "GeoNorm is better than Pre-Norm here"
    low, high = (f"{bound:+.3f}".replace("-", "\N{MINUS SIGN}") for bound in gap["ci_corrected"])
    assert f"GeoNorm (decay=sqrt) ends {-gap['mean']:.3f} nats below Pre-Norm" in found.sentences[0]
    assert (
        f"over seeds and documents and as wide as Holm's rule for all rows asks, is {low} to {high}"
        in found.sentences[0]
    )
    assert "No verdict on SandwichNorm: a seed was lost." in found.sentences
    assert any("DeepNorm, 3 diverged" in doubt and "none finished" in doubt for doubt in found.doubts)
    assert any("SandwichNorm, 1 failed (learning rate 0.004)" in doubt for doubt in found.doubts)


def test_a_loser_is_called_worse_and_nobody_a_winner(tmp_path):
    results = build_results({"pre": 1.5, "post": 1.501, "geonorm": 1.7})
    assert verdicts(results) == {"pre": None, "post": "no difference shown", "geonorm": "worse"}
    assert finding(results).headline == "No placement is shown to be better than Pre-Norm here; GeoNorm is worse"
    text = report(tmp_path, results)
    assert "so no difference is shown" in text
    assert "geonorm" in text


def test_noise_is_no_difference(tmp_path):
    results = build_results({**LOSSES, "geonorm:decay=sqrt": 1.585}, noise=0.02)
    assert set(verdicts(results).values()) == {None, "no difference shown"}
    assert finding(results).headline == "No difference to Pre-Norm is shown here"
    assert "better" not in rendered(results).replace("lower is better", "")


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2)])
def test_too_few_seeds_show_losses_and_no_winner(tmp_path, seeds):
    results = build_results(seeds=seeds)
    assert set(verdicts(results).values()) == {None}
    assert claims_nothing(results)
    found = finding(results)
    assert found.headline == "Test losses of 5 placements, without a verdict"
    assert f"reporting seeds shared with the reference: {len(seeds) - 1}, needed: 3." in " ".join(found.sentences)
    assert ("seeds decide" in " ".join(found.sentences)) == (len(seeds) < 3)
    text = report(tmp_path, results)
    assert "no verdict" in text
    if len(seeds) == 1:
        assert "the choosing seed's loss" in text


def test_one_seed_and_its_interval_carry_no_verdict(tmp_path):
    results = build_results(lrs=(0.004,), seeds=(0,), tuned=[*LOSSES, "geonorm(decay=sqrt)"])
    row = results["summary"][0]
    assert row["difference"]["kind"] == "documents"
    assert row["difference"]["ci"][1] < 0
    assert claims_nothing(results)
    assert "It does not contain the variation from seed to seed" in report(tmp_path, results)


def test_one_rate_for_all_has_no_verdict_and_says_why(tmp_path):
    results = build_results(lrs=(0.004,))
    assert claims_nothing(results)
    text = report(tmp_path, results)
    assert "learning rate was not searched to a factor of sqrt(2)" in text
    assert "All placements were given the same learning rate" in text


def test_rates_that_were_tuned_beforehand_carry_a_verdict():
    results = build_results(lrs=(0.004,), tuned=["pre", "geonorm(decay=sqrt)"])
    assert verdicts(results) == {"geonorm": "better", **dict.fromkeys(["pre", "post", "deepnorm", "sandwich"])}


def test_a_grid_coarser_than_sqrt_2_has_no_verdict():
    results = build_results(lrs=(0.00283, 0.004))
    assert claims_nothing(results)
    assert "No verdict: its and the reference's learning rate was not searched" in " ".join(finding(results).sentences)


def test_text_of_few_documents_has_no_verdict():
    results = build_results(documents=DOCUMENTS % 4)
    assert claims_nothing(results)
    assert "documents in the windows of the test text: 4, needed: 8" in " ".join(finding(results).sentences)


def test_without_pre_norm_there_is_no_verdict(tmp_path):
    results = build_results({"geonorm": 1.5, "post": 1.6})
    assert results["reference"] is None
    assert claims_nothing(results)
    results = build_results(failed=[("pre", None, None)])
    assert "no Pre-Norm that finished" in report(tmp_path, results)


def test_a_normalised_entry_is_said_in_words():
    results = parse_results(
        build_results({"pre:normalize_entry=true": 1.5, "pre": 1.6, "geonorm:decay=sqrt,alpha=2.0": 1.4})
    )
    names = {prose_name(row, results.summary) for row in results.summary}
    assert names == {"Pre-Norm with a normalised entry", "Pre-Norm", "GeoNorm"}


def test_no_finished_trial(tmp_path):
    results = build_results(diverged=[(None, None, None)])
    for trial in results["trials"]:
        trial["peak_memory_bytes"] = None
    text = report(tmp_path, results)
    assert "No trial finished, so there is nothing to compare" in text
    assert "loss was not finite at step 180" in text
    assert "None" not in text
    assert "nan" not in text


def test_single_finished_placement():
    found = finding(build_results(failed=[("pre", None, None)], losses={"pre": 1.6, "post": 1.5}))
    assert found.headline == "Only Post-Norm finished; there is nothing to compare it with"
    assert "No trial of Pre-Norm finished." in found.sentences


def test_nulls_are_dashes(tmp_path):
    results = build_results()
    for trial in results["trials"]:
        trial |= {"tokens_per_second": None, "peak_memory_bytes": None, "train_loss": None, "seconds": None}
    for row in results["summary"]:
        row |= {"test_loss_ci": None, "difference": None, "verdict": None, "test_bits_per_byte_mean": None}
    text = report(tmp_path, results)
    assert "None" not in text
    assert "Speed and memory" not in text


def test_terminal_table_fits_80_columns_and_holds_every_number(full):
    results = full[1]
    text = rendered(results)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    placements = {row["placement"] for row in results["summary"]}
    order = [line.split()[0] for line in lines if line.strip() and line.split()[0] in placements]
    assert order == [row["placement"] for row in results["summary"]]
    for row in results["summary"]:
        if row["test_loss_mean"] is not None:
            assert f"{row['test_loss_mean']:.3f}" in text
            assert "[{:.3f}, {:.3f}]".format(*row["test_loss_ci"]) in text
            if row["difference"]:
                assert "[{:+.3f}, {:+.3f}]".format(*row["difference"]["ci_corrected"]) in text
                assert {"better": "better", None: "no verdict"}.get(row["verdict"], "not shown") in text
    assert "seeds" in text
    assert "3 of 3 trials diverged" in rendered(results, 120)


@pytest.mark.parametrize("width", [20, 40, 60])
def test_rows_of_a_narrow_terminal_keep_their_names_and_numbers(width):
    names = ["geonorm:decay=sqrt", "geonorm:decay=none", "pre:normalize_entry=true", "pre"]
    results = build_results(dict.fromkeys(names, 1.5))
    text = rendered(results, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("decay=sqrt", "decay=none", "pre", *(f"{row['test_loss_mean']:.3f}" for row in results["summary"])):
        assert word in text if width >= 40 else word[:4] in text
    assert ("normalize_entry" if width == 60 else "norm") in text


def test_labels_keep_only_the_options_that_differ():
    def labels(*placements):
        results = build_results(dict.fromkeys(placements, 1.5), lrs=(0.004,), seeds=(0,))
        rows = {row.label: row for row in parse_results(results).summary}
        return sorted(short_labels(list(rows.values())))

    assert labels(
        "geonorm:decay=sqrt,alpha=2.0", "geonorm:decay=none,alpha=2.0", "post", "pre:normalize_entry=true"
    ) == [
        "geonorm none",
        "geonorm sqrt",
        "post",
        "pre",
    ]
    assert labels("pre", "pre:normalize_entry=true") == ["pre", "pre normalize_entry"]


def test_trials_of_two_implementations_are_named():
    results = build_results()
    for number, trial in enumerate(results["trials"]):
        trial["step"] = "cpp" if number % 2 else "autograd"
    assert any("same implementation of the step (autograd and cpp)" in doubt for doubt in finding(results).doubts)
    for trial in results["trials"]:
        trial["step"] = "cpp"
    assert not any("implementation" in doubt for doubt in finding(results).doubts)
