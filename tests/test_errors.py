"""Errors name what was wrong and what to do, in one line."""

from __future__ import annotations

import math

import pytest
import torch

from geonorm import UserError
from geonorm.errors import check_count, check_positive, unknown


def test_a_user_error_is_a_value_error():
    assert issubclass(UserError, ValueError)


def test_unknown_suggests_the_nearest_and_lists_the_known_in_order():
    assert str(unknown("colour", "gren", ["red", "green"])) == (
        "unknown colour 'gren'; did you mean 'green'? (known: green, red)"
    )


def test_unknown_suggests_nothing_when_nothing_is_near():
    assert str(unknown("colour", "xyzzy", {"red": 1, "green": 2})) == "unknown colour 'xyzzy' (known: green, red)"
    assert str(unknown("colour", None, ["red"])) == "unknown colour None (known: red)"


@pytest.mark.parametrize("value", [1, 0.5, 1e-300, torch.tensor([2.0]).numpy()[0]])
def test_positive_numbers_come_back_as_floats(value):
    checked = check_positive("rate", value)
    assert type(checked) is float
    assert checked == value


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_positive(value):
    with pytest.raises(UserError, match=f"`rate` must be positive, got {value}"):
        check_positive("rate", value)


@pytest.mark.parametrize("value", [True, "1e-4", None, [1], 1j])
def test_what_is_no_number(value):
    with pytest.raises(UserError, match="`rate` must be a positive number, got "):
        check_positive("rate", value)


def test_counts():
    assert check_count("layers", 3) == 3
    assert check_count("layers", 0, minimum=0) == 0
    assert type(check_count("layers", torch.tensor([3]).numpy()[0])) is int


@pytest.mark.parametrize("value", [0, -2, 1.0, "3", None, True])
def test_what_is_no_count(value):
    with pytest.raises(UserError, match="`layers` must be a whole number of at least 1, got "):
        check_count("layers", value)


def test_the_minimum_is_named():
    with pytest.raises(UserError, match="at least 5, got 4"):
        check_count("layers", 4, minimum=5)
