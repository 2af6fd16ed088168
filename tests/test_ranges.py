"""Every option that is a number has a range, and what lies outside it is named in one line."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Annotated

import pytest

from geonorm import UserError
from geonorm.cli import main
from geonorm.cli.compare_command import Compare
from geonorm.cli.convert_command import Convert
from geonorm.cli.eval_command import Eval
from geonorm.cli.generate_command import Generate
from geonorm.cli.inspect_command import Inspect
from geonorm.cli.prepare_command import Prepare
from geonorm.ranges import Count, Number, check_ranges, ranges
from geonorm.sweep.sweep_config import SweepConfig
from geonorm.training.config import RunConfig
from geonorm.training.recipe import load

HUGE = 99999999999999999999
COMMANDS = [Compare, Convert, Eval, Generate, Inspect, Prepare]


def numeric(kind) -> set[type]:
    """Which of int and float occur in a type."""
    parts = typing.get_args(kind)
    return {kind} & {int, float} if not parts else set().union(*map(numeric, parts))


def fields(kind, prefix: str = ""):
    """Every number in a configuration: dotted name, type, range."""
    known = ranges(kind)
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from fields(hint, f"{prefix}{name}.")
        elif found := numeric(hint):
            yield f"{prefix}{name}", found.pop(), known.get(name)


@pytest.mark.parametrize("kind", [*COMMANDS, RunConfig, SweepConfig], ids=lambda kind: kind.__name__)
def test_every_number_has_a_range_that_leaves_out_what_breaks(kind):
    found = list(fields(kind))
    assert found
    for name, type_, allowed in found:
        assert isinstance(allowed, Count if type_ is int else Number), name
        for value in (HUGE, -HUGE, math.nan, math.inf, -math.inf, True, "3"):
            if not (type_ is float and value == HUGE and allowed.high >= HUGE):
                with pytest.raises(UserError, match=rf"^`{name}` [^\n]*$"):
                    allowed.check(name, value)


@pytest.mark.parametrize("name", [name for name, _, _ in fields(RunConfig)])
@pytest.mark.parametrize("value", ["-99999999999999999999", ".nan", ".inf"])
def test_a_recipe_is_one_line_for_a_number_out_of_range(name, value):
    value = f"[{value}, 0.9]" if name == "optimizer.betas" else value
    with pytest.raises(UserError, match=rf"^`{name}`[^\n]*$"):
        load([], [f"{name}={value}"])


@pytest.mark.parametrize(
    "words",
    [
        ["train", f"seed={HUGE}"],
        ["compare", "--seeds", str(HUGE)],
        ["compare", "optimizer.weight_decay=.nan"],
        ["generate", "model", "--seed", str(HUGE)],
        ["generate", "model", "--temperature", "inf"],
        ["eval", "model", "--text", "text", "--batch", str(HUGE)],
        ["inspect", "model", "--length", str(HUGE)],
        ["convert", "model", "--out", "out", "--max-angle", "nan"],
        ["prepare", "--max-documents", str(HUGE)],
        ["plan", "--num-gpus", str(HUGE)],
        ["plan", "--mfu", "nan"],
    ],
    ids=" ".join,
)
def test_a_command_is_one_line_for_a_number_out_of_range(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: `")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass
class Options:
    share: Annotated[float, Number(0, 1, above=True, below=True)] = 0.5
    counts: Annotated[tuple[int, ...], Count(2, 4)] = ()
    least: Annotated[int | None, Count()] = None


def test_ends_of_ranges():
    check_ranges(Options(counts=(2, 4), least=1))
    for wrong in ({"share": 0.0}, {"share": 1.0}, {"counts": (2, 5)}, {"counts": (1,)}, {"least": 0}):
        with pytest.raises(UserError, match=f"^`part.{next(iter(wrong))}` must be"):
            check_ranges(Options(**wrong), "part.")
