"""Summaries of trials: the choice of rates, intervals over seeds and documents, verdicts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from geonorm.report.results import Trial
from geonorm.storage import write_json
from geonorm.sweep.rates import best_lr, is_tuned, untried_neighbours
from geonorm.sweep.statistics import estimate, holm_levels
from geonorm.sweep.summary import Design, summarize

GRID = (5.66e-3, 8e-3, 1.13e-2)
DOCUMENTS = [number // 3 for number in range(30)]


def trial_result(label, lr, seed, loss, status="ok"):
    return Trial(
        id=f"{label}-{lr}-{seed}",
        label=label,
        placement=label.partition("(")[0],
        options={},
        lr=lr,
        seed=seed,
        val_loss=loss,
        test_loss=loss,
        test_bits_per_byte=None if loss is None else loss / 2,
        status=status,
    )


def searched(label, losses, best=8e-3):
    """Seed 0 at three rates, then seeds 1, 2, ... at the best one."""
    trials = [trial_result(label, lr, 0, 2.0 + (lr != best)) for lr in GRID]
    return trials + [trial_result(label, best, seed, loss) for seed, loss in enumerate(losses, start=1)]


def write_windows(root, trials, documents=DOCUMENTS):
    for trial in trials:
        if trial.test_loss is not None:
            (root / trial.id).mkdir()
            loss = [trial.test_loss + number / 10 for number in documents]
            write_json(root / trial.id / "test_windows.json", {"loss": loss, "document": documents})


def test_an_interval_of_two_seeds_is_finite():
    """Taking from the variance what the seeds and the documents share must not leave next to no degrees of freedom."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        losses, documents = rng.normal(size=(2, 24)), np.repeat(np.arange(6), 4)
        low, high = estimate(losses, documents).interval()
        assert high - low < 26 * np.abs(losses).max()


def test_the_choosing_seed_alone_chooses():
    trials = [trial_result("pre", 1e-3, 0, 2.0), trial_result("pre", 2e-3, 0, 2.1), trial_result("pre", 2e-3, 1, 1.0)]
    trials += [trial_result("pre", 4e-3, 0, None, "diverged")]
    assert best_lr(trials, 0) == 1e-3
    assert best_lr(trials, 1) == 2e-3
    assert best_lr(trials[3:], 0) is None


@pytest.mark.parametrize(
    ("best", "tried", "missing"),
    [
        (8e-3, [4e-3, 8e-3, 1.6e-2], [5.66e-3, 1.13e-2]),
        (8e-3, [5.66e-3, 8e-3, 1.13e-2], []),
        (8e-3, [7e-3, 8e-3, 9e-3], [5.66e-3, 1.13e-2]),
        (8e-3, [7.9e-3, 8e-3, 8.1e-3, 1.6e-2], [5.66e-3, 1.13e-2]),
        (8e-3, [4.5e-3, 6e-3, 8e-3, 1e-2, 1.2e-2], []),
        (5.66e-3, [4e-3, 5.66e-3, 8e-3], []),
        (1.6e-2, [4e-3, 8e-3, 1.6e-2], [1.13e-2, 2.26e-2]),
        (1.41e-2, [1e-2, 1.41e-2], [2e-2]),
        (3e-3, [3e-3], [2.12e-3, 4.24e-3]),
    ],
)
def test_neighbours_a_factor_of_sqrt_2_away(best, tried, missing):
    assert untried_neighbours(best, tried) == missing


def test_a_rate_is_tuned_once_both_neighbours_were_tried():
    trials = searched("pre", [])
    assert is_tuned(trials, 0)
    assert not is_tuned(trials[:2], 0)
    trials[2] = trial_result("pre", 1.13e-2, 0, None, "diverged")
    assert is_tuned(trials, 0)
    trials[2] = trial_result("pre", 1.13e-2, 0, None, "failed")
    assert not is_tuned(trials, 0)


def test_the_seed_that_chose_does_not_report(tmp_path):
    trials = searched("pre", [3.0, 3.1, 3.2]) + searched("geonorm", [2.5, 2.61, 2.71])
    write_windows(tmp_path, trials)
    rows, (variant,) = summarize(trials, tmp_path, Design((1, 2, 3), 0))
    assert [row.label for row in rows] == ["geonorm", "pre"]
    best, reference = rows
    assert variant.reference == "pre"
    assert reference.test_loss_mean == pytest.approx(3.1)
    assert (reference.num_seeds, reference.best_lr, reference.lrs_tried) == (3, 8e-3, GRID)
    assert best.difference.mean == pytest.approx(-1.48 / 3)
    assert (best.verdict, best.no_verdict) == ("better", ())
    assert reference.difference is reference.verdict is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"losses": [2.5]}, "few seeds"),
        ({"losses": [2.5, None, 2.7, 2.6]}, "seed lost"),
        ({"grid": True}, "not tuned"),
        ({"documents": [0] * 15 + [1] * 15}, "few documents"),
        ({"complete": False}, "not finished"),
    ],
)
def test_no_verdict_without_seeds_rates_documents_or_an_end(tmp_path, change, why):
    geonorm = searched("geonorm", change.get("losses", [2.5, 2.6, 2.7]))
    geonorm = [dataclasses.replace(one, status="diverged") if one.val_loss is None else one for one in geonorm]
    if change.get("grid"):
        geonorm = [one for one in geonorm if one.lr != 5.66e-3]
    trials = searched("pre", [3.0, 3.1, 3.2, 3.1]) + geonorm
    write_windows(tmp_path, trials, change.get("documents", DOCUMENTS))
    design = Design((1, 2, 3, 4), 0, complete=change.get("complete", True))
    row = next(row for row in summarize(trials, tmp_path, design)[0] if row.label == "geonorm")
    assert row.verdict is None
    assert row.no_verdict == (why,)


def test_a_row_that_lost_a_seed_does_not_lead(tmp_path):
    trials = searched("pre", [3.0, 3.1, 3.2]) + searched("post", [2.0, 2.1])
    trials += [trial_result("post", 8e-3, 3, None, "diverged")]
    rows = summarize(trials, tmp_path, Design((1, 2, 3), 0))[0]
    assert [(row.label, row.num_seeds, row.num_lost) for row in rows] == [("pre", 3, 0), ("post", 2, 1)]
    assert rows[1].test_loss_mean == pytest.approx(2.05)


def test_the_reference_is_the_pre_norm_of_the_lowest_validation_loss(tmp_path):
    trials = [trial_result("pre", 8e-3, 0, 3.0), trial_result("pre(normalize_entry=True)", 8e-3, 0, 2.9)]
    trials += [trial_result("geonorm", 8e-3, 0, 2.8)]
    assert summarize(trials, tmp_path, Design((0,)))[1][0].reference == "pre(normalize_entry=True)"
    assert summarize(trials[2:], tmp_path, Design((0,)))[1][0].reference is None


def test_seeds_alone_give_student_s_interval():
    losses = np.array([2.0, 2.1, 1.9])
    low, high = estimate(losses[:, None]).interval()
    # Student t with 2 degrees of freedom: 4.302653 times the standard error, worked by hand.
    half = 4.302653 * math.sqrt(0.01 / 3)
    assert (low, high) == pytest.approx((2.0 - half, 2.0 + half), rel=1e-5)
    assert estimate(losses[:1, None]).interval() is None


def test_documents_widen_an_interval_and_never_narrow_it():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(10), 5)
    for spread in (0.0, 1.0):
        effect = spread * rng.normal(size=10)[documents]
        losses = rng.normal(size=(4, 1)) * 0.1 + effect + rng.normal(size=(4, 50)) * 0.01
        low, high = estimate(losses, documents).interval()
        alone = estimate(losses.mean(axis=1, keepdims=True)).interval()
        assert high - low >= (alone[1] - alone[0]) * (1 - 1e-9)
        assert estimate(losses, documents).kind == "seeds and documents"
    assert high - low > 2 * (alone[1] - alone[0])


def test_one_seed_is_a_bootstrap_over_whole_documents():
    documents = np.repeat(np.arange(20), 4)
    losses = np.random.default_rng(1).normal(size=20)[documents][None]
    found = estimate(losses, documents)
    assert found.kind == "documents"
    half = 1.96 * losses.std() / math.sqrt(20)
    assert found.interval()[1] - found.interval()[0] == pytest.approx(2 * half, rel=0.25)
    assert found.interval() == estimate(losses, documents).interval()
    assert found.p_value() == 1


def test_a_mean_is_over_labels_where_windows_have_different_numbers_of_them():
    losses = np.array([[1.0, 3.0], [2.0, 4.0]])
    assert estimate(losses, np.array([0, 1]), np.array([3, 1])).mean == pytest.approx((1.5 + 2.5) / 2)


def test_holm_stops_at_the_first_that_is_not_rejected():
    assert holm_levels([0.01, 0.04, 0.03]) == pytest.approx([1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05 / 2])
    assert holm_levels([0.001, 0.02, 0.04]) == pytest.approx([1 - 0.05 / 3, 1 - 0.05 / 2, 0.95])
    assert holm_levels([]) == []


def test_the_test_text_chooses_nothing():
    low, high = (
        dataclasses.replace(trial_result("pre", lr, 0, 2.0), val_loss=val) for lr, val in ((1e-3, 2.1), (2e-3, 2.0))
    )
    assert best_lr([dataclasses.replace(low, test_loss=1.0), dataclasses.replace(high, test_loss=9.0)], 0) == 2e-3


def test_what_rows_share_cancels_in_their_difference(tmp_path):
    trials = searched("pre", [3.0, 3.5, 2.5, 3.2]) + searched("geonorm", [2.9, 3.41, 2.39, 3.1])
    trials += searched("post", [3.01, 3.49, 2.5, 3.2])
    write_windows(tmp_path, trials)
    rows = {row.label: row for row in summarize(trials, tmp_path, Design((1, 2, 3, 4), 0))[0]}
    difference = rows["geonorm"].difference
    assert (difference.kind, difference.num_seeds) == ("seeds and documents", 4)
    assert np.ptp(difference.ci) < 0.1 * np.ptp(rows["geonorm"].test_loss_ci)
    # Two rows are compared, so the stronger difference is judged at 97.5 %.
    low, high = difference.ci_corrected
    assert low < difference.ci[0] < difference.ci[1] < high < 0
    assert {label: row.verdict for label, row in rows.items()} == {
        "geonorm": "better",
        "pre": None,
        "post": "no difference shown",
    }


def test_each_variant_has_a_reference_of_its_own_and_all_are_corrected_together(tmp_path):
    trials = []
    for name, shift in (("optimizer.name=adamw", 0.0), ("optimizer.name=muon", -1.0)):
        mine = searched("pre", [3.0, 3.1, 3.2]) + searched("geonorm", [2.5, 2.61, 2.71])
        trials += [
            dataclasses.replace(
                one, variant=name, id=f"{name}-{one.id}", val_loss=one.val_loss + shift, test_loss=one.test_loss + shift
            )
            for one in mine
        ]
    write_windows(tmp_path, trials)
    names = {"optimizer.name=adamw": {"optimizer.name": "adamw"}, "optimizer.name=muon": {"optimizer.name": "muon"}}
    rows, variants = summarize(trials, tmp_path, Design((1, 2, 3), 0), names)
    assert [(one.name, one.values, one.reference) for one in variants] == [(k, v, "pre") for k, v in names.items()]
    assert [(row.variant, row.label) for row in rows] == [(k, label) for k in names for label in ("geonorm", "pre")]
    for row in (rows[0], rows[2]):
        assert row.difference.mean == pytest.approx(-1.48 / 3)
        assert row.verdict == "better"
    # One of the two is judged at 97.5 %.
    assert sum(row.difference.ci != row.difference.ci_corrected for row in (rows[0], rows[2])) == 1
