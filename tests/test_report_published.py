"""The paper's values stand beside a run of its size and text, marked, and touch nothing else."""

from __future__ import annotations

import copy

import pytest

from geonorm.report import describe, parse_results
from geonorm.report.published import PUBLISHED, published_beside
from report_runs import build_results, rendered, report


def run_of(size, name):
    results = build_results(lrs=(0.004,))
    for trial in results["trials"]:
        trial["num_parameters"] = size
    results["corpus"]["name"] = name
    return results


@pytest.mark.parametrize(
    ("size", "name", "losses"),
    [
        (123_532_800, "arxiv-000.jsonl, arxiv-001.jsonl", [1.8792]),
        (134_000_000, "common-pile/arxiv_papers", [1.8792]),
        (123_532_800, "Books3", [3.4040]),
        (1_311_281_152, "HuggingFaceFW/fineweb-edu", [3.1759, 3.2067]),
        (123_532_800, "HuggingFaceFW/fineweb-edu", []),
        (353_847_296, "arxiv.jsonl", []),
        (123_532_800, "HuggingFaceFW/fineweb", []),
        (123_532_800, "pg19", []),
        (1_311_281_152, "searxiver.txt", []),
        (1_800_000, "arxiv.jsonl", []),
    ],
)
def test_only_the_same_size_and_text_match(size, name, losses):
    assert [value.loss for value in published_beside(parse_results(run_of(size, name)))] == losses


def test_a_run_of_unknown_or_mixed_size_matches_nothing():
    results = run_of(None, "arxiv.jsonl")
    assert published_beside(parse_results(results)) == []
    results["trials"][0]["num_parameters"] = 350_000_000
    results["trials"][1]["num_parameters"] = 125_000_000
    assert published_beside(parse_results(results)) == []


def test_the_page_marks_them_as_the_papers_and_ranks_without_them(tmp_path):
    results = run_of(1_311_281_152, "HuggingFaceFW/fineweb-edu")
    before = copy.deepcopy(results)
    text = report(tmp_path / "with", results)
    assert "What the paper reports" in text
    assert "geonorm 1.3B FineWeb-Edu 3.1759 pre 1.3B FineWeb-Edu 3.2067" in text
    assert "Values of arXiv 2601.22095, not of this run" in text
    assert results == before
    other = {**results, "corpus": {**results["corpus"], "name": "pg19"}}
    page = report(tmp_path / "without", other)
    assert "What the paper reports" not in page
    assert not any(f"{value.loss:.4f}" in page for value in PUBLISHED)
    assert describe(parse_results(results)) == describe(parse_results(other))
    assert rendered(results) == rendered(other)
