"""Step sizes by hand-computed values, and what users get wrong."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geonorm import UserError
from geonorm.schedules import DECAYS, step_sizes

FOUR_LAYERS = {
    "harmonic": [2.0, 1.0, 2 / 3, 0.5],
    "sqrt": [2.0, math.sqrt(2), 2 / math.sqrt(3), 1.0],
    "linear": [2.0, 1.5, 1.0, 0.5],
    "none": [2.0, 2.0, 2.0, 2.0],
}


def test_every_decay_has_values_by_hand():
    assert set(FOUR_LAYERS) == set(DECAYS)


@pytest.mark.parametrize("decay", sorted(FOUR_LAYERS))
def test_values(decay):
    assert step_sizes(decay, 2.0, 4) == pytest.approx(FOUR_LAYERS[decay], rel=1e-15)


@given(st.sampled_from(sorted(DECAYS)), st.floats(1e-6, 1e6), st.integers(1, 300))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_first_is_alpha_none_is_zero_none_grows(decay, alpha, num_layers):
    sizes = step_sizes(decay, alpha, num_layers)
    assert len(sizes) == num_layers
    assert sizes[0] == alpha
    assert all(size > 0 for size in sizes)
    assert all(later <= earlier for earlier, later in itertools.pairwise(sizes))


def test_linear_counts_from_one_so_the_last_layer_moves():
    assert step_sizes("linear", 1.0, 12)[-1] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("harmonc", 1.0, 4), "unknown decay 'harmonc'; did you mean 'harmonic'"),
        ((None, 1.0, 4), "unknown decay None"),
        ((["sqrt"], 1.0, 4), "unknown decay"),
        (("sqrt", 0.0, 4), "`alpha` must be positive, got 0.0"),
        (("sqrt", -1, 4), "`alpha` must be positive, got -1"),
        (("sqrt", math.nan, 4), "`alpha` must be positive, got nan"),
        (("sqrt", "1e-4", 4), "`alpha` must be a positive number, got '1e-4'"),
        (("sqrt", 1.0, 0), "`num_layers` must be a whole number of at least 1, got 0"),
        (("sqrt", 1.0, 2.5), "`num_layers` must be a whole number of at least 1, got 2.5"),
        (("sqrt", 1.0, True), "`num_layers` must be a whole number of at least 1, got True"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        step_sizes(*arguments)
