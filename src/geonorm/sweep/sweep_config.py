"""What a comparison varies: the section ``compare`` of a recipe. Imports nothing heavy, so that help appears soon."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from geonorm.errors import UserError
from geonorm.ranges import FACTOR, SEED, check_ranges

_FIVE = ("geonorm", "pre", "post", "deepnorm", "sandwich")
# Axes of their own.
OWN_OPTION = {
    "model.placement": "--placements",
    "model.options": "--placements NAME:OPTION=VALUE",
    "optimizer.lr": "--lrs",
    "seed": "--seeds",
}


@dataclasses.dataclass(frozen=True)
class TunedRates:
    """How the recipe's rates were found, if they are each placement's best to a factor of sqrt(2) with this recipe.

    Attributes:
        note: for the report, in a sentence.
        seed: the seed that found them, which must not report.
        corpus: fingerprint of the text that they were found on.
    """

    note: str
    seed: Annotated[int, SEED] = 0
    corpus: str = ""


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The axes of a comparison.

    Attributes:
        placements: each ``NAME`` or ``NAME:OPTION=VALUE,...``.
        seeds: with several rates a placement the first chooses and the others report, else all report.
        lrs: learning rates to try, the same for every placement; empty for those below.
        lrs_by_placement: learning rates by the placement's label or, failing that, its name.
        vary: further keys of the run's configuration with the values that each takes; every combination is a variant.
        refine: after the grid, try the neighbours of each best rate, a factor of sqrt(2) away.
        full_grid: run every learning rate with every seed.
        tuned: how ``lrs_by_placement`` was found; None where it was not.
    """

    placements: tuple[str, ...] = _FIVE
    seeds: Annotated[tuple[int, ...], SEED] = (0, 1, 2, 3)
    lrs: Annotated[tuple[float, ...], FACTOR] = ()
    lrs_by_placement: Annotated[dict[str, tuple[float, ...]], FACTOR] = dataclasses.field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    refine: bool = True
    full_grid: bool = False
    tuned: TunedRates | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "compare.")
        for name in ("placements", "seeds", "lrs"):
            _check_distinct(f"compare.{name}", getattr(self, name))
        for name in ("placements", "seeds"):
            if not getattr(self, name):
                raise UserError(f"`compare.{name}` is empty; name at least one")
        for placement in self.placements:
            if "=" in placement.partition(":")[0]:
                raise UserError(f"`compare.placements` has {placement!r}; give KEY=VALUE before the options")
        for label, lrs in self.lrs_by_placement.items():
            if not lrs:
                raise UserError(f"`compare.lrs_by_placement.{label}` is empty; name at least one rate")
            _check_distinct(f"compare.lrs_by_placement.{label}", lrs)
        for key, values in self.vary.items():
            self._check_varied(key, values)

    def _check_varied(self, key: str, values: tuple[Any, ...]) -> None:
        for own, option in OWN_OPTION.items():
            if key == own or key.startswith(f"{own}."):
                raise UserError(f"`compare.vary` has {key}, which {option} varies")
        if key.startswith("data.") and key != "data.seq_len":
            raise UserError(f"`compare.vary` has {key}, but one comparison has one corpus; compare texts one by one")
        if key.startswith(("checkpoint.", "tracking.", "sampling.")) or key in ("device", "peak_flops"):
            raise UserError(f"`compare.vary` has {key}, which changes no result")
        if not values:
            raise UserError(f"`compare.vary.{key}` has no value; give at least one")
        _check_distinct(f"compare.vary.{key}", values)


def _check_distinct(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"`{name}` has {value} twice; give each once")
