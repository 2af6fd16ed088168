"""Summaries of trials: the choice of rates, intervals, paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from geonorm.experiments.statistics import best_lr, bootstrap_interval, summarize, t_interval
from geonorm.storage import write_json


def trial_result(label: str, lr: float, seed: int, loss: float | None, status: str = "ok") -> dict:
    return {
        "id": f"{label}-{lr}-{seed}",
        "label": label,
        "placement": label,
        "options": {},
        "lr": lr,
        "seed": seed,
        "val_loss": loss,
        "val_bits_per_byte": None if loss is None else loss / 2,
        "status": status,
    }


def test_best_rate_compares_shared_seeds_only():
    trials = [
        trial_result("pre", 1e-3, 0, 2.0),
        trial_result("pre", 2e-3, 0, 2.1),
        trial_result("pre", 1e-3, 1, 9.0),
        trial_result("pre", 4e-3, 0, None, "diverged"),
    ]
    assert best_lr(trials) == 1e-3
    assert best_lr(trials[3:]) is None
    assert best_lr([]) is None


def test_a_row_that_lost_a_seed_says_so_and_does_not_lead(tmp_path):
    """Whether one rate or several were tried: the survivors' mean is shown, marked, below every whole row."""
    trials = [trial_result("pre", 1e-3, seed, 2.0 + seed / 10) for seed in range(3)]
    trials += [trial_result("post", 1e-3, seed, loss) for seed, loss in ((0, 1.8), (1, 1.81))]
    trials += [trial_result("post", 1e-3, 2, None, "diverged")]
    trials += [trial_result("sandwich", lr, 0, loss) for lr, loss in ((1e-3, 1.7), (2e-3, 1.9))]
    trials += [trial_result("sandwich", 1e-3, 1, None, "diverged"), trial_result("sandwich", 1e-3, 2, 1.72)]
    rows = summarize(trials, tmp_path)
    assert [row["label"] for row in rows] == ["pre", "sandwich", "post"]
    assert [(row["num_seeds"], row["num_lost"]) for row in rows] == [(3, 0), (2, 1), (2, 1)]
    assert rows[1]["val_loss_mean"] == pytest.approx(1.71)
    assert rows[2]["val_loss_mean"] == pytest.approx(1.805)


def test_a_rate_that_diverges_less_is_chosen_first():
    trials = [trial_result("pre", 1e-3, seed, 2.0) for seed in range(2)]
    trials += [trial_result("pre", 2e-3, 0, 1.5), trial_result("pre", 2e-3, 1, None, "diverged")]
    assert best_lr(trials) == 1e-3
    assert best_lr(trials[2:]) == 2e-3


def test_summary_over_seeds(tmp_path):
    pre, geo = [2.0, 2.1, 1.9], [1.9, 2.05, 1.8]
    trials = [trial_result("pre", 1e-3, seed, loss) for seed, loss in enumerate(pre)]
    trials += [trial_result("geonorm", 1e-3, seed, loss) for seed, loss in enumerate(geo)]
    trials += [trial_result("post", 1e-3, seed, None, "failed") for seed in range(3)]
    rows = summarize(trials, tmp_path)
    assert [row["label"] for row in rows] == ["geonorm", "pre", "post"]
    # Student t with 2 degrees of freedom: 4.302653 times the standard error, worked by hand.
    spread = 4.302653 * math.sqrt(0.01 / 3)
    assert rows[1]["val_loss_ci"] == pytest.approx([2.0 - spread, 2.0 + spread], rel=1e-5)
    differences = np.array(geo) - np.array(pre)
    spread = 4.302653 * differences.std(ddof=1) / math.sqrt(3)
    assert rows[0]["difference"]["mean"] == pytest.approx(differences.mean())
    assert rows[0]["difference"]["ci"] == pytest.approx([differences.mean() - spread, differences.mean() + spread])
    assert rows[0]["difference"]["kind"] == "paired seeds"
    assert rows[1]["difference"] is None
    assert rows[0]["behind_best"] is None
    assert rows[1]["behind_best"]["mean"] == pytest.approx(-differences.mean())
    assert rows[2]["val_loss_mean"] is None
    assert rows[2]["num_failed"] == 3


def test_summary_of_one_seed_is_over_windows(tmp_path):
    generator = np.random.default_rng(0)
    shared = generator.normal(2.0, 0.5, 300)
    for label, losses in (("pre", shared), ("geonorm", shared - 0.1 + generator.normal(0, 0.01, 300))):
        folder = tmp_path / f"{label}-0.001-0"
        folder.mkdir()
        write_json(folder / "window_losses.json", losses.tolist())
    rows = summarize([trial_result("pre", 1e-3, 0, 2.0), trial_result("geonorm", 1e-3, 0, 1.9)], tmp_path)
    assert all(row["ci_kind"] == "windows" for row in rows)
    wide = rows[0]["val_loss_ci"][1] - rows[0]["val_loss_ci"][0]
    narrow = rows[0]["difference"]["ci"][1] - rows[0]["difference"]["ci"][0]
    assert wide == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(300), rel=0.2)
    assert narrow < wide / 20
    assert rows[0]["difference"]["ci"][1] < 0


def test_reference_is_the_best_variant_of_pre(tmp_path):
    variants = [
        {**trial_result(f"pre({number})", 1e-3, 0, loss), "placement": "pre", "options": {"normalize_entry": True}}
        for number, loss in enumerate((2.2, 2.1))
    ]
    geonorm = trial_result("geonorm", 1e-3, 0, 2.0)
    rows = summarize([*variants, geonorm], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre(1)"
    rows = summarize([*variants, geonorm, trial_result("pre", 1e-3, 0, 3.0)], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre(1)"
    rows = summarize([*variants, geonorm, trial_result("pre", 1e-3, 0, 2.05)], tmp_path)
    assert rows[0]["difference"]["reference"] == "pre"
    assert summarize([geonorm], tmp_path)[0]["difference"] is None


def test_intervals_at_the_edges():
    assert t_interval([1.0]) is None
    assert t_interval([1.0, 1.0]) == [1.0, 1.0]
    assert bootstrap_interval(np.array([1.0])) is None
    assert bootstrap_interval(np.ones(5)) is None
    values = np.arange(50.0)
    assert bootstrap_interval(values) == bootstrap_interval(values)
