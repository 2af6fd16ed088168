"""Intervals over seeds and documents: by hand, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import coverage
from scipy import stats

from geonorm.sweep.statistics import Estimate, estimate, holm_levels

T2 = 4.302653  # Student t, 2 degrees of freedom, 95 %


def crossed(seeds, documents, rest, sizes):
    """Losses whose windows repeat their document's mean exactly."""
    means = np.asarray(seeds)[:, None] + np.asarray(documents) + np.asarray(rest)
    index = np.repeat(np.arange(len(sizes)), sizes)
    return means[:, index], index


def test_seeds_alone_give_students_interval():
    losses, index = crossed([0.1, 0.0, -0.1], np.zeros(6), np.zeros((3, 6)), [5] * 6)
    found = estimate(losses, index)
    half = T2 * 0.1 / np.sqrt(3)
    assert found.kind == "seeds and documents"
    assert found.interval() == pytest.approx([-half, half], rel=1e-5)
    assert estimate(losses.mean(axis=1, keepdims=True)).interval() == pytest.approx([-half, half], rel=1e-5)
    assert estimate(losses.mean(axis=1, keepdims=True)).kind == "seeds"


def test_documents_alone_give_students_interval_over_documents():
    documents = np.array([0.3, -0.1, 0.2, -0.4])
    losses, index = crossed(np.zeros(3), documents, np.zeros((3, 4)), [7] * 4)
    low, high = stats.t.interval(0.95, 3, loc=documents.mean(), scale=stats.sem(documents))
    assert estimate(losses, index).interval() == pytest.approx([low, high], rel=1e-6)


def test_the_rest_is_not_counted_twice():
    """By hand: two seeds, two documents of one window, losses 0, 1, 1, 4; variances 1 + 1 - 1/4 times 2/2."""
    found = estimate(np.array([[0.0, 1.0], [1.0, 4.0]]), np.array([0, 1]))
    (error, freedom), alone = found.errors
    # Over seeds: means 0.5 and 2.5, so 2 / 2 = 1. Over documents the same. The rest is +-0.5 in each cell: 0.25.
    assert error**2 == pytest.approx(1 + 1 - 0.25)
    assert freedom == pytest.approx(1.75**2 / (1 + 1 + 0.25**2))
    assert alone == pytest.approx((1.0, 1.0))


def test_what_cannot_be_told_has_no_interval():
    assert estimate(np.array([[1.0, 2.0]])).interval() is None
    assert estimate(np.array([[1.0, 1.0]]), np.array([0, 1])).interval() is None
    same = estimate(np.ones((3, 4)), np.array([0, 0, 1, 1]))
    assert same.interval() == (1.0, 1.0)


def test_p_value_is_where_the_interval_touches_zero():
    rng = np.random.default_rng(1)
    found = estimate(rng.normal(0.4, 1, (3, 60)) + rng.normal(0, 0.2, (3, 1)), np.repeat(np.arange(12), 5))
    low, high = found.interval(1 - found.p_value())
    assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-9)


def test_holm_rejects_as_by_hand():
    assert holm_levels([0.01, 0.04, 0.03]) == pytest.approx([1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05 / 2])
    assert holm_levels([0.001, 0.04, 0.02]) == pytest.approx([1 - 0.05 / 3, 0.95, 1 - 0.05 / 2])
    assert holm_levels([]) == []
    # An interval at its level excludes zero exactly where Holm's adjusted p-value is below 0.05.
    rng = np.random.default_rng(0)
    for _ in range(50):
        p_values = list(rng.uniform(0, 0.1, 5))
        levels = holm_levels(p_values)
        order = np.argsort(p_values)
        adjusted = np.maximum.accumulate([(5 - rank) * p_values[index] for rank, index in enumerate(order)])
        rejected = {int(index) for index, value in zip(order, adjusted, strict=True) if value < 0.05}
        assert {index for index in range(5) if p_values[index] < 1 - levels[index] - 1e-12} == rejected


def test_an_estimate_without_errors_says_nothing():
    assert Estimate(1.0).interval() is None
    assert Estimate(1.0).p_value() == 1.0


@pytest.mark.parametrize("varies", coverage.SCENARIOS)
def test_intervals_hold_the_truth_as_often_as_they_say(varies):
    """95 % with ten documents or more and three seeds or more, within the error of the simulation."""
    rows = coverage.simulate(coverage.CoverageSettings(repeats=1000, seeds=(3, 5), documents=(10,)), (varies,))
    # A share of 1,000 has a standard error of 0.7 points; the borders are 0.93 and 0.97 plus two of them.
    for row in rows:
        assert 0.93 - 0.014 <= row["coverage"] <= 0.97 + 0.014, row
