"""The report: its sentences follow the verdicts, and its table in the terminal."""

from __future__ import annotations

import dataclasses
import re

import pytest

from geonorm.report import describe
from geonorm.report.format import prose_name, short_labels
from geonorm.report.results import REASONS
from report_runs import LOSSES, SETTINGS, build_results, rendered, report, with_trials


def verdicts(results):
    return {row.placement: row.verdict for row in results.summary}


CLAIMS = {"better", "worse", "wins", "winner", "beats", "leads"}


def claims_nothing(results) -> bool:
    found = describe(results)
    return not CLAIMS & set(re.findall(r"\w+", " ".join([found.headline, *found.sentences]).lower()))


def test_a_difference_that_is_shown_is_the_headline(full):
    _, results, _ = full
    found = describe(results)
    gap = next(row for row in results.summary if row.placement == "geonorm").difference
    assert verdicts(results)["geonorm"] == "better"
    assert found.headline == "GeoNorm is better than Pre-Norm here"
    low, high = (f"{bound:+.3f}".replace("-", "\N{MINUS SIGN}") for bound in gap.ci_corrected)
    assert f"GeoNorm (decay=sqrt) ends {-gap.mean:.3f} nats below Pre-Norm" in found.sentences[0]
    assert (
        f"over seeds and documents and as wide as Holm's rule for all rows asks, is {low} to {high}"
        in found.sentences[0]
    )
    assert (
        "No verdict on SandwichNorm: a seed was lost; reporting seeds shared with the reference: 2, needed: 3."
        in found.sentences
    )
    assert any("DeepNorm, 3 diverged" in doubt and "none finished" in doubt for doubt in found.doubts)
    assert any("SandwichNorm, 1 failed (learning rate 0.004)" in doubt for doubt in found.doubts)


def test_a_loser_is_called_worse_and_nobody_a_winner(tmp_path):
    results = build_results({"pre": 1.5, "post": 1.501, "geonorm": 1.7})
    assert verdicts(results) == {"pre": None, "post": "no difference shown", "geonorm": "worse"}
    assert describe(results).headline == "No placement is shown to be better than Pre-Norm here; GeoNorm is worse"
    text = report(tmp_path, results)
    assert "so no difference is shown" in text
    assert "geonorm" in text


def test_noise_is_no_difference(tmp_path):
    results = build_results({**LOSSES, "geonorm:decay=sqrt": 1.585}, noise=0.02)
    assert set(verdicts(results).values()) == {None, "no difference shown"}
    assert describe(results).headline == "No difference to Pre-Norm is shown here"
    assert "better" not in rendered(results).replace("lower is better", "")


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2)])
def test_too_few_seeds_show_losses_and_no_winner(tmp_path, seeds):
    results = build_results(seeds=seeds)
    assert set(verdicts(results).values()) == {None}
    assert claims_nothing(results)
    found = describe(results)
    assert found.headline == "Test losses of 5 placements, without a verdict"
    assert f"reporting seeds shared with the reference: {len(seeds) - 1}, needed: 3" in " ".join(found.sentences)
    assert ("seeds decide" in " ".join(found.sentences)) == (len(seeds) < 3)
    text = report(tmp_path, results)
    assert "no verdict" in text
    if len(seeds) == 1:
        assert "the choosing seed's loss" in text


def test_one_seed_and_its_interval_carry_no_verdict(tmp_path):
    results = build_results(lrs=(0.004,), seeds=(0,), tuned=[*LOSSES, "geonorm(decay=sqrt)"])
    difference = results.summary[0].difference
    assert difference.kind == "documents"
    assert difference.ci[1] < 0
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
    assert "No verdict: its and the reference's learning rate was not searched" in " ".join(describe(results).sentences)


def test_text_of_few_documents_has_no_verdict():
    results = build_results(num_documents=4)
    assert claims_nothing(results)
    assert "documents in the windows of the test text: 4, needed: 8" in " ".join(describe(results).sentences)


def test_without_pre_norm_there_is_no_verdict(tmp_path):
    results = build_results({"geonorm": 1.5, "post": 1.6})
    assert results.reference is None
    assert claims_nothing(results)
    results = build_results(failed=[("pre", None, None)])
    assert "no Pre-Norm that finished" in report(tmp_path, results)


def test_a_normalised_entry_is_said_in_words():
    results = build_results({"pre:normalize_entry=true": 1.5, "pre": 1.6, "geonorm:decay=sqrt,alpha=2.0": 1.4})
    names = {prose_name(row, results.summary) for row in results.summary}
    assert names == {"Pre-Norm with a normalised entry", "Pre-Norm", "GeoNorm"}


def test_no_finished_trial(tmp_path):
    results = with_trials(build_results(diverged=[(None, None, None)]), lambda *_: {"peak_memory_bytes": None})
    text = report(tmp_path, results)
    assert "No trial finished, so there is nothing to compare" in text
    assert "loss was not finite at step 180" in text
    assert "None" not in text
    assert "nan" not in text


def test_single_finished_placement():
    found = describe(build_results(failed=[("pre", None, None)], losses={"pre": 1.6, "post": 1.5}))
    assert found.headline == "Only Post-Norm finished; there is nothing to compare it with"
    assert "No trial of Pre-Norm finished." in found.sentences


def test_nulls_are_dashes(tmp_path):
    unknown = dict.fromkeys(("tokens_per_second", "peak_memory_bytes", "train_loss", "num_parameters", "code"))
    results = with_trials(build_results(), lambda *_: {**unknown, "seconds": 0.0})
    rows = dict.fromkeys(("test_loss_ci", "difference", "verdict", "test_bits_per_byte_mean"))
    results = dataclasses.replace(results, summary=tuple(dataclasses.replace(row, **rows) for row in results.summary))
    text = report(tmp_path, results)
    assert "None" not in text
    assert "Speed and memory" not in text
    assert "Tokens/s compares" not in text


def test_terminal_table_fits_80_columns_and_holds_every_number(full):
    results = full[1]
    text = rendered(results)
    table = text[: text.index("nats per token")]
    assert max(len(line) for line in table.splitlines()) <= 80
    placements = {row.placement for row in results.summary}
    order = [line.split()[0] for line in table.splitlines() if line.strip() and line.split()[0] in placements]
    assert order == [row.placement for row in results.summary]
    for row in results.finished:
        assert f"{row.test_loss_mean:.3f}" in table
        assert "[{:.3f}, {:.3f}]".format(*row.test_loss_ci) in table
        if row.difference:
            assert "[{:+.3f}, {:+.3f}]".format(*row.difference.ci_corrected) in table
            assert {"better": "better", None: "no verdict"}.get(row.verdict, "not shown") in table
    assert "seeds" in table
    assert "3 of 3 trials diverged" in rendered(results, 120)


def test_the_terminal_says_the_finding_and_the_notes():
    results = dataclasses.replace(build_results(), num_other_trials=2)
    said = rendered(results)
    found = describe(results)
    for line in (f"{found.headline}.", *found.sentences, *found.notes):
        assert line in said
    assert found.notes == ["The folder holds 2 more trials that are not part of this comparison."]


@pytest.mark.parametrize("width", [20, 40, 60])
def test_rows_of_a_narrow_terminal_keep_their_names_and_numbers(width):
    names = ["geonorm:decay=sqrt", "geonorm:decay=none", "pre:normalize_entry=true", "pre"]
    results = build_results(dict.fromkeys(names, 1.5))
    text = rendered(results, width)
    text = text[: text.index("nats per")]
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("decay=sqrt", "decay=none", "pre", *(f"{row.test_loss_mean:.3f}" for row in results.summary)):
        assert word in text if width >= 40 else word[:4] in text
    assert ("normalize_entry" if width == 60 else "norm") in text


def test_labels_keep_only_the_options_that_differ():
    def labels(*placements):
        results = build_results(dict.fromkeys(placements, 1.5), lrs=(0.004,), seeds=(0,))
        return sorted(short_labels(results.summary))

    assert labels(
        "geonorm:decay=sqrt,alpha=2.0", "geonorm:decay=none,alpha=2.0", "post", "pre:normalize_entry=true"
    ) == [
        "geonorm none",
        "geonorm sqrt",
        "post",
        "pre",
    ]
    assert labels("pre", "pre:normalize_entry=true") == ["pre", "pre normalize_entry"]


def reason(*reasons, **changes):
    """Sentence of a comparison whose row has these reasons for no verdict."""
    results = build_results({"pre": 1.6, "post": 1.5})
    rows = [
        dataclasses.replace(row, verdict=None, no_verdict=reasons, **changes) if row.placement == "post" else row
        for row in results.summary
    ]
    return describe(dataclasses.replace(results, summary=tuple(rows))).sentences[1]


def test_every_reason_for_no_verdict_has_its_words_and_numbers():
    tuned = "learning rate was not searched to a factor of sqrt(2)."
    words = {
        "not finished": "the comparison is not finished.",
        "seed lost": "a seed was lost.",
        "reference lost a seed": "a seed of the reference was lost.",
        "few seeds": "reporting seeds shared with the reference: 3, needed: 3.",
        "not tuned": f"its {tuned}",
        "reference not tuned": f"the reference's {tuned}",
        "few documents": "documents in the windows of the test text: 10, needed: 8.",
        "no seed shared": "it shares no seed with the reference.",
    }
    assert set(words) == set(REASONS)
    for one, said in words.items():
        assert reason(one) == f"No verdict: {said}"
    assert reason("not tuned", "reference not tuned") == f"No verdict: its and the reference's {tuned}"
    assert reason("few seeds", difference=None).endswith("with the reference: 0, needed: 3.")


def noted(**changes):
    return describe(dataclasses.replace(build_results(), **changes)).notes


def test_a_comparison_without_peculiarities_has_no_notes():
    assert noted() == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"complete": False, "num_other_trials": 3}, "The comparison is not finished: 30 trials have ended."),
        ({"num_other_trials": 1}, "The folder holds 1 more trial that is not part of this comparison."),
        (
            {"num_windows": {"val": 255, "test": 256}},
            "The validation text holds only 255 windows; all of them are used.",
        ),
        ({"num_windows": {"val": 256, "test": 1}}, "The test text holds only 1 window; all of them are used."),
    ],
)
def test_what_happened_in_a_run_is_noted(changes, note):
    assert noted(**changes) == [note]


def test_rates_of_elsewhere_are_noted():
    rates = dataclasses.replace(
        build_results().rates, source="tuned", inherited=("geonorm(decay=none)",), other_corpus=True
    )
    assert noted(rates=rates) == [
        "geonorm(decay=none) runs at the rate that was found for geonorm.",
        "The rates were found on another text than the one that is trained on here.",
    ]


def test_trials_of_two_versions_of_the_code_are_noted(tmp_path):
    results = with_trials(build_results(), lambda number, _: {"code": "0.1.0 aa" if number else "0.1.0 bb"})
    assert describe(results).notes == ["The trials did not all run on the same version of the code."]
    assert describe(results).notes[0] in report(tmp_path, results)
    # One that failed says nothing of what the others ran on.
    failed = with_trials(results, lambda number, _: {} if number else {"status": "failed"})
    assert describe(failed).notes == []


def test_trials_of_two_implementations_are_named():
    results = with_trials(build_results(), lambda number, _: {"step_impl": "cpp" if number % 2 else "autograd"})
    assert any("same implementation of the step (autograd and cpp)" in note for note in describe(results).notes)
    resumed = with_trials(build_results(), lambda number, _: {"step_impl": "autograd, cpp"})
    assert any("(autograd and cpp)" in note for note in describe(resumed).notes)
    results = with_trials(results, lambda *_: {"step_impl": "cpp"})
    assert describe(results).notes == []


def test_windows_that_a_variant_asks_for_count():
    variants = [dataclasses.replace(build_results().variants[0], values={"evaluation.windows": 1000})]
    settings = {key: value for key, value in SETTINGS.items() if key != "evaluation.windows"}
    assert len(noted(variants=tuple(variants), settings=settings)) == 2
