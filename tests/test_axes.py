"""From recipes and axes to trials."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from geonorm import UserError
from geonorm.cli.compare_command import Compare, axes_of, command_of
from geonorm.models import ModelShape
from geonorm.placements import available
from geonorm.report.results import Trial as TrialResult
from geonorm.storage import write_json
from geonorm.sweep.axes import Corpus, make_sweep, preset_names
from geonorm.sweep.rates import is_tuned
from geonorm.training import recipe

CORPUS = Corpus(Path("corpus"), "identity", "fingerprint")


def sweep(preset="tiny", words=(), files=(), **axes):
    return make_sweep(files, words, preset=preset, axes=axes)


def placement(trial) -> str:
    return trial.config.model.placement


@pytest.mark.parametrize("name", preset_names())
def test_presets_make_trials(name, tmp_path):
    trials = sweep(name).first_trials(CORPUS)
    assert {"geonorm", "pre", "deepnorm"} <= {placement(trial) for trial in trials}
    assert len({trial.id for trial in trials}) == len(trials)
    for trial in trials:
        recipe.save(tmp_path / "trial.yaml", trial.config)
        assert recipe.load([tmp_path / "trial.yaml"]).filled() == trial.config
    for one in ("geonorm:decay=sqrt", "pre:normalize_entry=true"):
        assert sweep(name, placements=[one]).rates[0]


def test_the_preset_of_the_field_has_every_placement():
    plan = sweep("field")
    names = {one.name for one in plan.placements}
    assert names == set(available())
    assert all(len(rates) >= 4 for rates in plan.rates)
    assert (plan.selection_seed, plan.reporting_seeds) == (0, (1, 2, 3))
    small, field = (sweep(name).variants[""] for name in ("small", "field"))
    assert field == small
    # The first seed tries every rate of every placement; the others wait for its choice.
    trials = plan.first_trials(CORPUS)
    assert {trial.seed for trial in trials} == {0}
    assert len(trials) == sum(len(rates) for rates in plan.rates)


def search(plan, losses, rounds=20):
    """Run a plan's trials, made up: ``losses`` gives the validation loss of a placement at a rate, None: diverged."""

    def run(trials):
        return [
            TrialResult(
                id=trial.id,
                variant=trial.variant,
                label=trial.label,
                placement=trial.label,
                options={},
                lr=trial.lr,
                seed=trial.seed,
                val_loss=losses(trial.label, trial.lr),
                status="diverged" if losses(trial.label, trial.lr) is None else "ok",
            )
            for trial in trials
        ]

    found, batches = run(plan.first_trials(CORPUS)), []
    for _ in range(rounds):
        trials = plan.refining_trials(found, CORPUS)
        if not trials:
            break
        batches.append([(trial.label, trial.lr, trial.seed) for trial in trials])
        found += run(trials)
    return found, batches


def searched(**changes):
    return sweep(**{"placements": ["pre", "post"], "lrs": [4e-3, 8e-3, 1.6e-2], "seeds": [5, 6, 7], **changes})


def valley(at):
    return lambda label, lr: abs(math.log(lr / at[label]))


def test_the_best_rate_gets_neighbours_a_factor_of_sqrt_2_away():
    """post has its best between two rates of the grid, pre at the upper edge, which is extended."""
    plan = searched()
    found, batches = search(plan, valley({"pre": 3.1e-2, "post": 6e-3}))
    assert batches[0] == [("pre", 1.13e-2, 5), ("pre", 2.26e-2, 5), ("post", 5.66e-3, 5), ("post", 1.13e-2, 5)]
    assert {label for batch in batches[1:] for label, *_ in batch} == {"pre"}
    later = plan.later_trials(found, CORPUS)
    assert [(t.label, t.seed) for t in later] == [("pre", 6), ("post", 6), ("pre", 7), ("post", 7)]
    rates = {t.label: t.lr for t in later}
    assert rates == {"pre": pytest.approx(3.1e-2, rel=0.2), "post": 5.66e-3}
    for label, lr in rates.items():
        assert is_tuned([one for one in found if one.label == label], 5), lr


def test_a_neighbour_that_diverged_counts_as_tried():
    _, batches = search(searched(), lambda label, lr: None if lr > 8e-3 else -lr)
    assert batches == [[("pre", 5.66e-3, 5), ("pre", 1.13e-2, 5), ("post", 5.66e-3, 5), ("post", 1.13e-2, 5)]]


def test_a_placement_without_a_finished_trial_is_given_up():
    plan = searched()
    found, batches = search(plan, lambda label, lr: None if label == "post" else abs(math.log(lr / 8e-3)))
    assert {label for batch in batches for label, *_ in batch} == {"pre"}
    assert {trial.label for trial in plan.later_trials(found, CORPUS)} == {"pre"}


def test_no_refinement_where_it_was_declined_or_nothing_is_searched():
    assert search(searched(refine=False), valley({"pre": 8e-3, "post": 8e-3}))[1] == []
    assert search(searched(lrs=[8e-3]), valley({"pre": 8e-3, "post": 8e-3}))[1] == []


def test_the_seed_that_chooses_does_not_report():
    plan = searched()
    assert {t.seed for t in plan.first_trials(CORPUS)} == {5}
    assert (plan.selection_seed, plan.reporting_seeds) == (5, (6, 7))
    plan = searched(lrs=[8e-3])
    assert (plan.selection_seed, plan.reporting_seeds) == (None, (5, 6, 7))
    assert {t.seed for t in plan.first_trials(CORPUS)} == {5, 6, 7}


def test_a_full_grid_runs_every_seed_at_every_rate_and_still_the_first_chooses():
    plan = searched(full_grid=True)
    assert len(plan.first_trials(CORPUS)) == 2 * 3 * 3
    found, batches = search(plan, valley({"pre": 8e-3, "post": 8e-3}))
    assert [batch for batch in batches[0] if batch[0] == "pre"] == [
        ("pre", lr, seed) for seed in (5, 6, 7) for lr in (5.66e-3, 1.13e-2)
    ]
    assert plan.later_trials(found, CORPUS) == []
    assert (plan.selection_seed, plan.reporting_seeds) == (5, (6, 7))


@pytest.mark.parametrize(
    ("preset", "words", "axes", "source"),
    [
        ("small", [], {}, "searched"),
        ("tiny", [], {}, "untuned"),
        ("tiny", [], {"lrs": [1e-3]}, "given"),
        ("tiny", [], {"lrs": [1e-3, 2e-3]}, "searched"),
        ("demo", [], {}, "tuned"),
        ("demo", ["evaluation.windows=16"], {}, "tuned"),
        ("demo", [], {"seeds": [0, 1, 2]}, "untuned"),
        ("demo", [], {"seeds": [4, 5, 6]}, "tuned"),
        ("demo", ["steps=100"], {}, "untuned"),
        ("demo", ["model.hidden_size=64"], {}, "untuned"),
        ("demo", ["optimizer.name=muon"], {}, "untuned"),
        ("demo", ["data.sources=[other.txt]"], {}, "untuned"),
        ("demo", [], {"lrs": [1e-3]}, "given"),
        ("demo", [], {"vary": {"schedule.name": ["cosine", "wsd"]}}, "untuned"),
    ],
)
def test_where_the_rates_come_from(preset, words, axes, source):
    """A recipe's rates are tuned for its own model, training and text alone."""
    plan = sweep(preset, words, **axes)
    rates = plan.rate_facts("fingerprint")
    assert rates.source == source
    tuned = plan.design(rates, complete=True).tuned
    assert bool(tuned) == (source == "tuned")
    assert "pre(normalize_entry=True)" in tuned or source != "tuned"


def test_the_demo_can_come_to_a_verdict():
    plan = sweep("demo")
    assert len(plan.reporting_seeds) >= 3
    # Seed 0 chooses the recipe's rates.
    assert 0 not in plan.reporting_seeds
    assert {one.label() for one in plan.placements} <= plan.axes.lrs_by_placement.keys()
    assert plan.rate_facts("another text").other_corpus
    assert not plan.rate_facts(plan.axes.tuned.corpus).other_corpus
    rates = sweep("demo", placements=["geonorm:decay=sqrt", "pre"]).rate_facts("")
    assert rates.inherited == ("geonorm(decay=sqrt)",)


def test_a_recipe_without_a_rate_for_a_placement_asks_for_one(tmp_path):
    (tmp_path / "own.yaml").write_text("compare: {placements: [post], lrs_by_placement: {pre: [1e-3]}}")
    with pytest.raises(UserError, match="no learning rate for placement 'post'; give --lrs"):
        sweep(None, files=[tmp_path / "own.yaml"])
    assert sweep(None, files=[tmp_path / "own.yaml"], lrs=[1e-3]).rates == ((1e-3,),)


def test_the_recipe_of_one_run_is_taken_with_its_rate(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {placement: geonorm, options: {alpha: 0.5}, num_layers: 3}\noptimizer: {lr: 1e-3}\nseed: 9\n"
    )
    plan = sweep(None, files=[tmp_path / "run.yaml"], placements=["pre", "geonorm"], seeds=[1])
    trials = plan.first_trials(CORPUS)
    assert [(t.label, t.lr, t.seed, t.config.model.num_layers) for t in trials] == [
        ("pre", 1e-3, 1, 3),
        ("geonorm", 1e-3, 1, 3),
    ]


def test_every_combination_of_varied_keys_is_a_variant_with_a_search_of_its_own():
    vary = {"optimizer.name": ["adamw", "muon"], "model.num_layers": [2, 4]}
    plan = searched(vary=vary)
    assert list(plan.variants) == [
        f"optimizer.name={name},model.num_layers={n}" for name in ("adamw", "muon") for n in (2, 4)
    ]
    assert plan.values["optimizer.name=muon,model.num_layers=4"] == {"optimizer.name": "muon", "model.num_layers": 4}
    trials = plan.first_trials(CORPUS)
    assert len(trials) == 4 * 2 * 3 == len({trial.id for trial in trials})
    for trial in trials:
        named = f"optimizer.name={trial.config.optimizer.name},model.num_layers={trial.config.model.num_layers}"
        assert trial.variant == named
    assert not {"optimizer.name", "model.num_layers"} & plan.shared().keys()
    assert plan.shared()["global_batch_size"] == 4


def test_lengths_that_follow_the_steps_are_filled_in_for_each_variant():
    plan = sweep(vary={"steps": [20, 200]})
    assert [run.schedule.warmup for run in plan.variants.values()] == [2, 20]


@pytest.mark.parametrize(
    ("words", "axes", "message"),
    [
        ([], {"vary": {"optimizer.lr": [1e-3]}}, "`compare.vary` has optimizer.lr, which --lrs varies"),
        ([], {"vary": {"model.options.alpha": [1]}}, "model.options.alpha, which --placements"),
        ([], {"vary": {"data.vocab_size": [257, 300]}}, "one comparison has one corpus"),
        ([], {"vary": {"checkpoint.every": [1, 2]}}, "which changes no result"),
        ([], {"vary": {"optimizer.name": ["adamw", "adamw"]}}, "has adamw twice"),
        ([], {"vary": {"optimizer.nam": ["adamw"]}}, "did you mean 'optimizer.name'"),
        ([], {"vary": {"optimizer.name": ["sgd"]}}, "unknown value of `optimizer.name` 'sgd'"),
        (["seed=3"], {}, "`seed` is one run's; a comparison takes --seeds"),
        (["model.placement=pre"], {}, "`model.placement` is one run's; a comparison takes --placements"),
        (["optimizer.lr=1e-3"], {}, "a comparison takes --lrs"),
        ([], {"placements": ["pre", "steps=3"]}, "give KEY=VALUE before the options"),
        ([], {"placements": []}, "`compare.placements` is empty"),
        (["compare.sedes=[1]"], {}, "did you mean 'compare.seeds'"),
        ([], {"seeds": [1, 1]}, "`compare.seeds` has 1 twice"),
    ],
)
def test_axes_that_cannot_be(words, axes, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        sweep("tiny", words, **axes)


def test_results_of_another_trial_are_not_kept(tmp_path):
    trial = sweep(placements=["pre"]).first_trials(CORPUS)[0]
    other = dataclasses.replace(trial, corpus="another")
    assert trial.read_result(tmp_path) is None
    write_json(tmp_path / "result.json", {"status": "ok", "val_loss": 1.5})
    with pytest.raises(UserError, match="holds the result of a trial with other settings"):
        trial.read_result(tmp_path)
    write_json(tmp_path / "run.json", {"corpus": trial.corpus})
    recipe.save(tmp_path / "config.yaml", trial.config)
    assert trial.read_result(tmp_path).val_loss == 1.5
    assert json.loads((tmp_path / "result.json").read_text())["val_loss"] == 1.5
    for wrong in (other, dataclasses.replace(trial, config=dataclasses.replace(trial.config, steps=21))):
        with pytest.raises(UserError, match="holds the result of a trial with other settings"):
            wrong.read_result(tmp_path)
    (tmp_path / "result.json").write_text('{"status": "o')
    assert trial.read_result(tmp_path) is None


def test_ids_tell_close_rates_apart():
    plan = sweep(placements=["pre"], lrs=[1e-3, 1.0000001e-3])
    assert len({trial.id for trial in plan.first_trials(CORPUS)}) == 2


def test_ids_of_many_varied_keys_fit_a_file_system():
    vary = {f"evaluation.{name}": [1, 10**6] for name in ("every", "windows", "layers_every", "log_every")}
    vary |= {f"schedule.{name}": [0, 10] for name in ("warmup", "decay")} | {"optimizer.weight_decay": [0.1, 0.2]}
    trials = sweep(
        placements=["geonorm:decay=sqrt,alpha=0.25,normalize_update=true"], seeds=[0], vary=vary
    ).first_trials(CORPUS)
    assert len({trial.id for trial in trials}) == len(trials) == 2**7
    assert max(len(f"{trial.id}.yaml.123456.partial") for trial in trials) < 255


def test_model_shape():
    assert ModelShape(hidden_size=128).inner == 344
    assert ModelShape(hidden_size=128, intermediate_size=512).inner == 512


def test_the_command_names_what_decides_the_result():
    options = Compare(
        words=("steps=30",),
        preset="tiny",
        placements=("geonorm:decay=sqrt", "pre"),
        vary=("steps=1,2",),
        jobs=3,
        resume=True,
    )
    assert command_of(options) == (
        "geonorm compare steps=30 --preset tiny --placements geonorm:decay=sqrt pre --vary steps=1,2 --out runs/compare"
    )
    assert axes_of(options) == {"placements": ["geonorm:decay=sqrt", "pre"], "vary": {"steps": [1, 2]}}
