"""From options and presets to trials."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from geonorm import UserError
from geonorm.experiments import CompareConfig
from geonorm.experiments.plan import CorpusKey, make_plan
from geonorm.experiments.presets import PRESETS
from geonorm.experiments.rates import is_tuned
from geonorm.experiments.trials import Trial, folder_holds_another, read_result
from geonorm.models import ModelShape
from geonorm.storage import write_json


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_plans(name):
    plan = make_plan(CompareConfig(preset=name))
    trials = plan.first_trials(CorpusKey("f", 300))
    assert {"geonorm", "pre", "deepnorm"} <= {trial.placement for trial in trials}
    assert {trial.vocab_size for trial in trials} == {300}
    assert len({trial.id for trial in trials}) == len(trials)
    for trial in trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
    for parts in (("geonorm", "decay=sqrt"), ("pre", "normalize_entry=true")):
        plan = make_plan(CompareConfig(preset=name, placements=(":".join(parts),)))
        assert plan.rates[0]


KEY = CorpusKey("f", 257)


def search(plan, losses, rounds=20):
    """Run a plan's trials, made up: ``losses`` gives the validation loss of a placement at a rate, None: diverged."""

    def run(trials):
        return [
            {
                "label": trial.label,
                "lr": trial.training.lr,
                "seed": trial.training.seed,
                "val_loss": losses(trial.placement, trial.training.lr),
                "status": "diverged" if losses(trial.placement, trial.training.lr) is None else "ok",
            }
            for trial in trials
        ]

    found, batches = run(plan.first_trials(KEY)), []
    for _ in range(rounds):
        trials = plan.refining_trials(found, KEY)
        if not trials:
            break
        batches.append([(trial.placement, trial.training.lr, trial.training.seed) for trial in trials])
        found += run(trials)
    return found, batches


def searched_plan(**changes):
    options = {"preset": "tiny", "placements": ("pre", "post"), "lrs": (4e-3, 8e-3, 1.6e-2), "seeds": (5, 6, 7)}
    return make_plan(CompareConfig(**{**options, **changes}))


def valley(at):
    return lambda placement, lr: abs(math.log(lr / at[placement]))


def test_the_best_rate_gets_neighbours_a_factor_of_sqrt_2_away():
    """post has its best between two rates of the grid, pre at the upper edge, which is extended."""
    plan = searched_plan()
    found, batches = search(plan, valley({"pre": 3.1e-2, "post": 6e-3}))
    assert batches[0] == [("pre", 1.13e-2, 5), ("pre", 2.26e-2, 5), ("post", 5.66e-3, 5), ("post", 1.13e-2, 5)]
    assert {placement for batch in batches[1:] for placement, *_ in batch} == {"pre"}
    later = plan.later_trials(found, KEY)
    assert [(t.placement, t.training.seed) for t in later] == [("pre", 6), ("post", 6), ("pre", 7), ("post", 7)]
    rates = {t.placement: t.training.lr for t in later}
    assert rates == {"pre": pytest.approx(3.1e-2, rel=0.2), "post": 5.66e-3}
    for placement, lr in rates.items():
        assert is_tuned([one for one in found if one["label"] == placement], 5), lr


def test_a_neighbour_that_diverged_counts_as_tried():
    _, batches = search(searched_plan(), lambda placement, lr: None if lr > 8e-3 else -lr)
    assert batches == [[("pre", 5.66e-3, 5), ("pre", 1.13e-2, 5), ("post", 5.66e-3, 5), ("post", 1.13e-2, 5)]]


def test_a_placement_without_a_finished_trial_is_given_up():
    plan = searched_plan()
    found, batches = search(plan, lambda placement, lr: None if placement == "post" else abs(math.log(lr / 8e-3)))
    assert {placement for batch in batches for placement, *_ in batch} == {"pre"}
    assert {trial.placement for trial in plan.later_trials(found, KEY)} == {"pre"}


def test_no_refinement_where_it_was_declined_or_nothing_is_searched():
    assert search(searched_plan(refine=False), valley({"pre": 8e-3, "post": 8e-3}))[1] == []
    assert search(searched_plan(lrs=(8e-3,)), valley({"pre": 8e-3, "post": 8e-3}))[1] == []
    assert "--no-refine" in searched_plan(refine=False).command()


def test_the_seed_that_chooses_does_not_report():
    plan = searched_plan()
    assert {t.training.seed for t in plan.first_trials(KEY)} == {5}
    assert (plan.selection_seed, plan.reporting_seeds) == (5, (6, 7))
    plan = searched_plan(lrs=(8e-3,))
    assert (plan.selection_seed, plan.reporting_seeds) == (None, (5, 6, 7))
    assert {t.training.seed for t in plan.first_trials(KEY)} == {5, 6, 7}


def test_a_full_grid_runs_every_seed_at_every_rate_and_still_the_first_chooses():
    plan = searched_plan(full_grid=True)
    assert len(plan.first_trials(KEY)) == 2 * 3 * 3
    found, batches = search(plan, valley({"pre": 8e-3, "post": 8e-3}))
    assert [batch for batch in batches[0] if batch[0] == "pre"] == [
        ("pre", lr, seed) for seed in (5, 6, 7) for lr in (5.66e-3, 1.13e-2)
    ]
    assert plan.later_trials(found, KEY) == []
    assert (plan.selection_seed, plan.reporting_seeds) == (5, (6, 7))


TUNED = "Found to a factor of sqrt(2) at seed 0."


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"preset": "small"}, "searched"),
        ({}, "untuned"),
        ({"lrs": (1e-3,)}, "given"),
        ({"lrs": (1e-3, 2e-3)}, "searched"),
        ({"preset": "demo"}, "tuned"),
        ({"preset": "demo", "eval_windows": 16}, "tuned"),
        ({"preset": "demo", "seeds": (0, 1, 2)}, "untuned"),
        ({"preset": "demo", "seeds": (4, 5, 6)}, "tuned"),
        ({"preset": "demo", "steps": 100}, "untuned"),
        ({"preset": "demo", "width": 64}, "untuned"),
        ({"preset": "demo", "data": ("other.txt",)}, "untuned"),
        ({"preset": "demo", "lrs": (1e-3,)}, "given"),
    ],
)
def test_where_the_rates_come_from(monkeypatch, changes, source):
    """A preset's rates are tuned for its own model, training and text alone."""
    monkeypatch.setitem(PRESETS, "demo", dataclasses.replace(PRESETS["demo"], tuned=TUNED))
    plan = make_plan(CompareConfig(**{"preset": "tiny", **changes}))
    assert plan.rate_source() == source
    assert bool(plan.design(complete=True).tuned) == (source == "tuned")
    assert "pre(normalize_entry=True)" in plan.design(complete=True).tuned or source != "tuned"


def test_the_demo_can_come_to_a_verdict():
    plan = make_plan(CompareConfig())
    assert len(plan.reporting_seeds) >= 3
    # Seed 0 chooses the preset's rates.
    assert 0 not in plan.reporting_seeds
    assert {placement.label() for placement in plan.placements} <= plan.preset.lrs.keys()


def test_a_preset_without_a_rate_for_a_placement_asks_for_one(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], lrs={"pre": (1e-3,)}))
    with pytest.raises(UserError, match="no learning rate for placement 'post'; give --lrs"):
        make_plan(CompareConfig(preset="tiny", placements=("post",)))
    assert make_plan(CompareConfig(preset="tiny", placements=("post",), lrs=(1e-3,))).rates == ((1e-3,),)


def test_results_of_another_trial_are_not_kept(tmp_path):
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre",)))
    trial, other = plan.first_trials(CorpusKey("f", 257))[0], plan.first_trials(CorpusKey("g", 257))[0]
    write_json(tmp_path / "trial.json", trial.to_json())
    assert read_result(tmp_path, trial) is None
    write_json(tmp_path / "result.json", {"status": "ok"})
    assert read_result(tmp_path, trial) == {"status": "ok"}
    assert read_result(tmp_path, other) is None
    assert not folder_holds_another(tmp_path, trial)
    assert folder_holds_another(tmp_path, other)
    (tmp_path / "result.json").write_text('{"status": "o')
    assert read_result(tmp_path, trial) is None


def test_ids_tell_close_rates_apart():
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre",), lrs=(1e-3, 1.0000001e-3)))
    assert len({trial.id for trial in plan.first_trials(CorpusKey("f", 257))}) == 2


def test_model_shape():
    assert ModelShape(width=128).inner == 344
    assert ModelShape(width=128, mlp_width=512).inner == 512


def test_the_command_names_what_decides_the_result():
    plan = make_plan(
        CompareConfig(preset="tiny", placements=("geonorm:decay=sqrt", "pre"), steps=30, jobs=3, resume=True)
    )
    assert plan.command() == (
        "geonorm compare --placements geonorm:decay=sqrt pre --preset tiny --out runs/compare --steps 30"
    )
    assert make_plan(CompareConfig()).command() == "geonorm compare --preset demo --out runs/compare"
