"""Recipes: the scalars of YAML 1.2, includes, overrides, and errors that name the key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from geonorm import UserError
from geonorm.training import RunConfig
from geonorm.training.recipe import dump, key_paths, load, parse_yaml


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("12.", 12.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("0x1f", 31),
        ("0o17", 15),
        ("010", 10),
        ("1:30", "1:30"),
        ("1_000", 1000),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("", None),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("2001-01-01", "2001-01-01"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    read = parse_yaml(text, "text")
    assert read == value
    assert type(read) is type(value)


def test_a_float_in_a_recipe_and_as_an_override(tmp_path):
    recipe = write(tmp_path / "a.yaml", "optimizer: {lr: 1e-4}\n")
    assert load([recipe]).optimizer.lr == 1e-4
    config = load([recipe], ["optimizer.lr=3e-5", "model.options.alpha=5e-1"])
    assert (config.optimizer.lr, config.model.options) == (3e-5, {"alpha": 0.5})


def test_later_wins_key_by_key_and_includes_come_first(tmp_path):
    write(tmp_path / "base.yaml", "steps: 10\nglobal_batch_size: 4\noptimizer: {lr: 1e-3, clip: 2}\n")
    write(tmp_path / "more.yaml", "include: [base.yaml]\noptimizer: {lr: 2e-3}\nglobal_batch_size: 8\n")
    other = write(tmp_path / "other.yaml", "global_batch_size: 2\n")
    config = load([tmp_path / "more.yaml", other], ["steps=20"])
    assert (config.steps, config.global_batch_size, config.optimizer.lr, config.optimizer.clip) == (20, 2, 2e-3, 2.0)


def test_options_do_not_outlive_their_placement(tmp_path):
    recipe = write(tmp_path / "a.yaml", "model: {placement: geonorm, options: {alpha: 2}}\n")
    assert load([recipe], ["model.placement=pre"]).model.options == {}
    assert load([recipe], ["model.options.decay=sqrt"]).model.options == {"alpha": 2, "decay": "sqrt"}


def test_the_resolved_configuration_gives_itself_back(tmp_path):
    config = load(
        [],
        [
            "tracking.name='1e-4'",
            "tracking.project='no'",
            "optimizer.lr=1e-5",
            "data.sources=[a b, c]",
            "model.start=~/x",
        ],
    )
    assert config.tracking.name == "1e-4"
    assert load([write(tmp_path / "config.yaml", dump(config))]) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("optimiser.lr=1", "unknown key 'optimiser'; did you mean 'optimizer'?"),
        ("checkpoint.placement=pre", "unknown key 'checkpoint.placement'; did you mean 'model.placement'?"),
        ("zzz=1", "unknown key 'zzz' (known: model, data,"),
        ("optimizer.lr=fast", "`optimizer.lr` must be a number, got 'fast'"),
        ("optimizer.lr=-1", "`optimizer.lr` must be positive, got -1.0"),
        ("steps=1.5", "`steps` must be a whole number, got 1.5"),
        ("steps=true", "`steps` must be a whole number, got True"),
        ("compile=yes", "`compile` must be true or false, got 'yes'"),
        ("optimizer=3", "`optimizer` must hold keys and values, got int"),
        ("optimizer.betas=[1]", "`optimizer.betas` needs 2 values, got [1]"),
        ("optimizer.name=adam", "unknown value of `optimizer.name` 'adam'; did you mean 'adamw'?"),
        ("steps", "override 'steps' is not KEY=VALUE"),
        ("steps=[", "cannot read override 'steps=['"),
        ("global_batch_size=&a 4", None),
        ("schedule.warmup=500", "`schedule.warmup` must be shorter than `steps`, got 500 and 500"),
    ],
)
def test_errors_name_the_key(override, message):
    if message is None:
        assert load([], [override]).global_batch_size == 4
        return
    with pytest.raises(UserError) as raised:
        load([], [override])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nsteps: 2\n", 'duplicate key "steps"'),
        ("a: &x [1]\nb: *x\n", "aliases are not taken"),
        ("steps: !!python/object/apply:os.system ['exit 3']\n", "could not determine a constructor"),
        ("include: a.yaml\n", "includes itself"),
        ("include: gone.yaml\n", "cannot read the recipe .*gone.yaml: No such file"),
        ("include: 3\n", "`include` in .* must be a path"),
        ("- 1\n", "must hold keys and values, got list"),
        ("1: 2\n", "has the key 1; keys are words"),
    ],
)
def test_recipes_that_cannot_be_read(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load([write(tmp_path / "a.yaml", text)])


def test_every_value_is_listed():
    paths = key_paths(RunConfig)
    assert {"steps", "optimizer.lr", "model.placement"} <= set(paths)
    assert len(paths) == len(set(paths))
