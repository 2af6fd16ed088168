"""From options and presets to trials."""

from __future__ import annotations

import dataclasses
import json

import pytest

from geonorm import UserError
from geonorm.experiments import CompareConfig
from geonorm.experiments.plan import CorpusKey, make_plan
from geonorm.experiments.presets import PRESETS
from geonorm.experiments.trials import Trial, folder_holds_another, read_result
from geonorm.models import ModelShape
from geonorm.placements import available
from geonorm.storage import write_json


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_plans(name):
    plan = make_plan(CompareConfig(preset=name))
    trials = plan.first_trials(CorpusKey("f", 300))
    assert {trial.placement for trial in trials} == set(available())
    assert {trial.vocab_size for trial in trials} == {300}
    assert len({trial.id for trial in trials}) == len(trials)
    for trial in trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
    for parts in (("geonorm", "decay=sqrt"), ("pre", "normalize_entry=true")):
        plan = make_plan(CompareConfig(preset=name, placements=(":".join(parts),)))
        assert plan.rates[0]


def test_one_seed_chooses_the_rate_and_the_others_follow():
    plan = make_plan(CompareConfig(preset="tiny", placements=("pre", "post"), lrs=(1e-3, 2e-3, 4e-3), seeds=(5, 6, 7)))
    first = plan.first_trials(CorpusKey("f", 257))
    assert {t.training.seed for t in first} == {5}
    assert len(first) == 6
    losses = {("pre", 1e-3): 3.0, ("pre", 2e-3): 2.0, ("pre", 4e-3): 2.5}
    results = [
        {
            "label": t.label,
            "lr": t.training.lr,
            "seed": 5,
            "val_loss": losses.get((t.placement, t.training.lr)),
            "status": "ok" if t.placement == "pre" else "diverged",
        }
        for t in first
    ]
    later = plan.later_trials(results, CorpusKey("f", 257))
    assert [(t.placement, t.training.lr, t.training.seed) for t in later] == [("pre", 2e-3, 6), ("pre", 2e-3, 7)]
    grid = make_plan(CompareConfig(preset="tiny", lrs=(1e-3, 2e-3), seeds=(0, 1), full_grid=True))
    assert len(grid.first_trials(CorpusKey("f", 257))) == 5 * 2 * 2
    assert grid.later_trials([], CorpusKey("f", 257)) == []


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"preset": "small"}, "searched"),
        ({"preset": "tiny"}, "untuned"),
        ({"preset": "tiny", "lrs": (1e-3,)}, "given"),
        ({"preset": "tiny", "lrs": (1e-3, 2e-3)}, "searched"),
        ({"preset": "demo"}, "tuned"),
    ],
)
def test_where_the_rates_come_from(changes, source):
    assert make_plan(CompareConfig(**changes)).rate_source() == source


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
