"""Papers' values stand beside a run of its size and text, marked, and touch nothing else."""

from __future__ import annotations

import dataclasses
import math

import pytest

from geonorm.report import describe
from geonorm.report.published import PUBLISHED, published_beside
from report_runs import build_results, rendered, report, with_trials


def run_of(size, name):
    results = with_trials(build_results(lrs=(0.004,)), lambda *_: {"num_parameters": size})
    return dataclasses.replace(results, corpus={**results.corpus, "name": name})


@pytest.mark.parametrize(
    ("size", "name", "losses"),
    [
        (123_532_800, "arxiv-000.jsonl, arxiv-001.jsonl", [1.8792]),
        (134_000_000, "common-pile/arxiv_papers", [1.8792]),
        (123_532_800, "Books3", [3.4040]),
        (1_311_281_152, "HuggingFaceFW/fineweb-edu", [3.1759, 3.2067]),
        (123_532_800, "HuggingFaceFW/fineweb-edu", []),
        (131_000_000, "allenai/c4", [math.log(ppl) for ppl in (14.67, 14.55, 14.45, 14.57, 14.84, 14.30)]),
        (1_311_281_152, "c4-000.jsonl", [math.log(ppl) for ppl in (10.32, 10.16, 9.93, 10.32, 11.62, 9.86)]),
        (131_000_000, "mc4", []),
        (353_847_296, "arxiv.jsonl", []),
        (123_532_800, "HuggingFaceFW/fineweb", []),
        (123_532_800, "pg19", []),
        (1_311_281_152, "searxiver.txt", []),
        (1_800_000, "arxiv.jsonl", []),
    ],
)
def test_only_the_same_size_and_text_match(size, name, losses):
    assert [value.loss for value in published_beside(run_of(size, name))] == losses


def test_a_run_of_unknown_or_mixed_size_matches_nothing():
    results = run_of(None, "arxiv.jsonl")
    assert published_beside(results) == []
    mixed = with_trials(results, lambda number, _: {"num_parameters": 125_000_000 if number % 2 else 350_000_000})
    assert published_beside(mixed) == []


def test_the_page_marks_them_as_the_papers_and_ranks_without_them(tmp_path):
    results = run_of(1_311_281_152, "HuggingFaceFW/fineweb-edu")
    text = report(tmp_path / "with", results)
    assert "What papers report" in text
    assert "geonorm 1.3B FineWeb-Edu 3.1759 arXiv 2601.22095 pre 1.3B FineWeb-Edu 3.2067 arXiv 2601.22095" in text
    assert "Values of arXiv 2601.22095, not of this run" in text
    other = run_of(1_311_281_152, "pg19")
    page = report(tmp_path / "without", other)
    assert "What papers report" not in page
    assert not any(f"{value.loss:.4f}" in page for value in PUBLISHED)
    assert describe(results) == describe(other)
    assert rendered(results) == rendered(other)
