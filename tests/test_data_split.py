"""Train and validation by document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geonorm.data.records import Document
from geonorm.data.split import Sample, Survey, cut_document
from geonorm.errors import UserError


def survey(documents):
    found = Survey()
    for text in documents:
        found.add(text)
    return found


def val_bytes(documents, split):
    return sum(len(text.encode()) for text in documents if split.side(text) == "val")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=20, unique=True), st.sampled_from([0.001, 0.05, 0.5]))
def test_both_sides_have_documents(documents, fraction):
    split = survey(documents).split(fraction)
    assert {split.side(text) for text in documents} == {"train", "val"}


def test_the_share_is_near_to_the_wanted_one():
    rng = np.random.default_rng(0)
    documents = [f"{number} " * int(rng.integers(1, 2000)) for number in range(400)]
    total = sum(map(len, documents))
    for fraction in (0.02, 0.05, 0.3):
        share = val_bytes(documents, survey(documents).split(fraction)) / total
        assert abs(share - fraction) <= 0.1 * fraction


@pytest.mark.parametrize("seed", range(8))
def test_a_huge_document_does_not_become_the_validation_side(seed):
    documents = [f"{seed} " * 100_000, f"{seed} b " * 300, f"{seed} c " * 300]
    assert val_bytes(documents, survey(documents).split(0.05)) < 5_000


def test_side_is_by_content_and_order_does_not_matter():
    documents = [f"document {number} " * 9 for number in range(300)]
    forward, backward = survey(documents).split(0.1), survey(reversed(documents)).split(0.1)
    assert forward == backward
    assert survey(documents).fingerprint != survey(reversed(documents)).fingerprint


def test_no_document_and_one_document():
    with pytest.raises(UserError, match="no document with text"):
        survey([]).split(0.1)
    split = survey(["line\n" * 100] * 3).split(0.1)
    assert split.parts("line\n" * 100) == [("train", "line\n" * 90), ("val", "line\n" * 10)]
    with pytest.raises(UserError, match="too short to split"):
        survey(["x"]).split(0.1).parts("x")


@given(st.text(alphabet="a \n", min_size=1), st.floats(0.01, 0.5))
def test_a_cut_loses_nothing(text, fraction):
    try:
        first, second = cut_document(text, (1 - fraction, fraction))
    except UserError:
        return
    assert first + second == text
    assert first.strip()
    assert second.strip()


def test_cut_without_line_breaks_is_by_position():
    assert cut_document("x" * 100, (0.75, 0.25)) == ["x" * 75, "x" * 25]


def test_sample_is_bounded_distinct_and_independent_of_order():
    documents = [f"{number} " * 50 for number in range(500)]
    sample = Sample(10_000, documents * 2).texts()
    assert 10_000 <= sum(map(len, sample)) < 10_000 + max(map(len, documents))
    assert len(set(sample)) == len(sample)
    assert sample == Sample(10_000, reversed(documents)).texts()
    assert sorted(Sample(10**9, documents).texts()) == sorted(documents)


SIZES = [2000, *[1000] * 5, *[40] * 60]


def of_sizes(sizes):
    return [f"{number} ".ljust(size, "x") for number, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(6))
def test_held_out_sides_have_a_floor_on_documents_and_a_cap_on_the_share_of_one(seed):
    documents = [f"{seed} {text}" for text in of_sizes(SIZES)]
    split = survey(documents).split(0.2, 0.2, min_documents=8, max_share=0.4)
    for side in ("val", "test"):
        sizes = [len(text) for text in documents if split.side(text) == side]
        assert len(sizes) >= 8
        assert max(sizes) <= 0.4 * sum(sizes)


@pytest.mark.parametrize(
    ("sizes", "limits", "message"),
    [
        ([100] * 9, {"min_documents": 8}, "no 10% of this text for the test side has at least 8 documents"),
        ([9000, *[10] * 40], {"max_share": 0.02}, "there are 41, the largest is 95.7% of the text; hold out more"),
        ([100], {"min_documents": 2}, "the corpus is one document .* or min_documents 1 to cut its end off"),
        ([100] * 2, {}, "the text has 2 documents .* give at least 3"),
    ],
)
def test_a_split_that_cannot_keep_to_the_limits_is_refused(sizes, limits, message):
    with pytest.raises(UserError, match=message):
        survey(of_sizes(sizes)).split(0.1, 0.1, **limits)


def test_groups_and_copies_that_differ_in_blanks_stay_on_one_side():
    documents = [Document(f"page {number} of {number % 40}", f"author {number % 40}") for number in range(800)]
    split = survey(documents).split(0.2, 0.2)
    sides = {}
    for text in documents:
        sides.setdefault(text.group, set()).add(split.side(text))
    assert all(len(found) == 1 for found in sides.values())
    assert set().union(*sides.values()) == {"train", "val", "test"}
    plain = [f"Document {number}" for number in range(100)]
    split = survey(plain).split(0.2, 0.2)
    assert [split.side(text) for text in plain] == [split.side(f"\n{text.upper()} \n") for text in plain]
