"""From a recipe and its axes to trials: which runs a comparison has, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from geonorm.errors import UserError, unknown
from geonorm.placements import Placement, parse
from geonorm.report.results import Rates
from geonorm.report.results import Trial as TrialResult
from geonorm.sweep.rates import best_lr, untried_neighbours
from geonorm.sweep.summary import Design
from geonorm.sweep.sweep_config import OWN_OPTION, SweepConfig
from geonorm.sweep.trial import Trial
from geonorm.training import recipe
from geonorm.training.config import RunConfig

# May differ from the recipe without making other rates the best.
_NOT_TUNED_FOR = (
    *("evaluation.", "checkpoint.", "tracking.", "sampling.", "faults.", "data.corpus", "data.sources", "device"),
    *("accumulation", "compile", "gradient_checkpointing", "parallel", "peak_flops", "seed"),
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a comparison has to know of its text: its folder, its identity to a run, and its fingerprint."""

    path: Path
    identity: str
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A comparison with every value decided.

    With several rates a placement, the first seed chooses and the others report; with one, all seeds report.

    Attributes:
        axes: what is varied.
        variants: configuration of each combination of further keys, by its name.
        values: those keys and their values, by the same name.
        placements, rates: what is compared and each one's learning rates.
        is_recipe: whether the run is the recipe's own, as far as its rates were tuned for it.
    """

    axes: SweepConfig
    variants: dict[str, RunConfig]
    values: dict[str, dict[str, Any]]
    placements: tuple[Placement, ...]
    rates: tuple[tuple[float, ...], ...]
    is_recipe: bool

    def with_run(self, change: Callable[[RunConfig], RunConfig]) -> Sweep:
        """The same comparison of changed runs."""
        return dataclasses.replace(self, variants={name: change(run) for name, run in self.variants.items()})

    def shared(self) -> dict[str, Any]:
        """Every value that all trials share, by dotted key; two comparisons with equal ones can be set side by side."""
        flat = recipe.flat(recipe.resolved(next(iter(self.variants.values()))))
        own = ("model.placement", "model.options", "optimizer.lr", "seed", "data.corpus", "data.sources")
        return {
            key: value
            for key, value in flat.items()
            if key not in self.axes.vary and not key.startswith((*own, "checkpoint.", "tracking.", "sampling."))
        }

    @property
    def selection_seed(self) -> int | None:
        """The seed that chooses the rates; None where there is nothing to choose."""
        return self.axes.seeds[0] if any(len(rates) > 1 for rates in self.rates) else None

    @property
    def reporting_seeds(self) -> tuple[int, ...]:
        """Seeds whose losses are reported."""
        return self.axes.seeds if self.selection_seed is None else self.axes.seeds[1:]

    def rate_facts(self, fingerprint: str) -> Rates:
        """Where the learning rates come from; the recipe's count as tuned for its own run only."""
        tuned, known = self.axes.tuned, self.axes.lrs_by_placement
        inherited: tuple[str, ...] = ()
        if self.selection_seed is not None:
            source = "searched"
        elif self.axes.lrs:
            source = "given"
        elif tuned is not None and self.is_recipe and tuned.seed not in self.reporting_seeds:
            source = "tuned"
            inherited = tuple(placement.label() for placement in self.placements if placement.label() not in known)
        else:
            source = "untuned"
        found = tuned if source == "tuned" else None
        return Rates(
            source=source,
            refined=source == "searched" and self.axes.refine,
            selection_seed=self.selection_seed,
            reporting_seeds=self.reporting_seeds,
            found=found.note if found else "",
            inherited=inherited,
            other_corpus=bool(found) and found.corpus != fingerprint,
        )

    def design(self, rates: Rates, complete: bool) -> Design:
        """What the summary has to know; a rate that was found for another variant of a placement is not tuned."""
        tuned = self.axes.lrs_by_placement.keys() - set(rates.inherited) if rates.source == "tuned" else ()
        return Design(self.reporting_seeds, self.selection_seed, frozenset(tuned), complete)

    def first_trials(self, corpus: Corpus) -> list[Trial]:
        """Trials that need no earlier result."""
        most = max(len(rates) for rates in self.rates)
        return [
            self._trial(variant, placement, rates[index], seed, corpus)
            for seed in self._first_seeds
            for variant in self.variants
            for index in range(most)
            for placement, rates in zip(self.placements, self.rates, strict=True)
            if index < len(rates)
        ]

    def refining_trials(self, results: list[TrialResult], corpus: Corpus) -> list[Trial]:
        """Trials at untried neighbours, a factor of sqrt(2) away, of each searched placement's best rate so far."""
        seed = self.selection_seed
        if seed is None or not self.axes.refine:
            return []
        trials = []
        for variant, placement, rates, mine in self._rows(results):
            best = best_lr(mine, seed)
            if best is not None and len(rates) > 1:
                missing = untried_neighbours(best, {result.lr for result in mine})
                trials += [
                    self._trial(variant, placement, lr, one, corpus) for one in self._first_seeds for lr in missing
                ]
        return trials

    def later_trials(self, results: list[TrialResult], corpus: Corpus) -> list[Trial]:
        """Trials of the reporting seeds that have not run, each placement at the rate that the first seed chose."""
        later = [seed for seed in self.axes.seeds if seed not in self._first_seeds]
        trials = []
        for variant, placement, _, mine in self._rows(results):
            lr = best_lr(mine, self.axes.seeds[0])
            if lr is not None:
                trials += [self._trial(variant, placement, lr, seed, corpus) for seed in later]
        return sorted(trials, key=lambda trial: later.index(trial.seed))

    def _rows(self, results: list[TrialResult]) -> list[tuple[str, Placement, tuple[float, ...], list[TrialResult]]]:
        return [
            (variant, placement, rates, [one for one in results if (one.variant, one.label) == (variant, label)])
            for variant in self.variants
            for placement, rates in zip(self.placements, self.rates, strict=True)
            for label in [placement.label()]
        ]

    @property
    def _first_seeds(self) -> tuple[int, ...]:
        return self.axes.seeds if self.selection_seed is None or self.axes.full_grid else self.axes.seeds[:1]

    def _trial(self, variant: str, placement: Placement, lr: float, seed: int, corpus: Corpus) -> Trial:
        base = self.variants[variant]
        config = dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, placement=placement.name, options=placement.options()),
            data=dataclasses.replace(base.data, corpus=corpus.path, sources=()),
            optimizer=dataclasses.replace(base.optimizer, lr=lr),
            seed=seed,
        )
        return Trial(variant, config, corpus.identity)


def make_sweep(
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    axes: dict[str, Any] | None = None,
) -> Sweep:
    """Fill a comparison from recipes, overrides and axes, and check it.

    Args:
        files: recipes with or without a section ``compare``.
        overrides: ``key=value``, as for a run; ``compare.seeds=[0, 1]`` and the like as well.
        preset: name of a recipe that comes with geonorm and stands before ``files``.
        axes: values of the section ``compare`` that stand before everything else.

    Raises:
        UserError: an unknown preset, key, placement or option, a value given twice or out of range.
    """
    for text in overrides:
        key = text.partition("=")[0].strip()
        for own_key, option in OWN_OPTION.items():
            if key == own_key or key.startswith(f"{own_key}."):
                raise UserError(f"`{key}` is one run's; a comparison takes {option}")
    files = [*([preset_path(preset)] if preset else []), *files]
    own, data = recipe.read(files), recipe.merged(recipe.read(files, overrides), {recipe.COMPARE: axes or {}})
    config = recipe.build_section(SweepConfig, data.pop(recipe.COMPARE) or {}, recipe.COMPARE)
    lr = (data.get("optimizer") or {}).get("lr")
    for one in (own, data):
        one.pop(recipe.COMPARE, None)
        # Of a run by itself; every trial has its own.
        one["model"] = {k: v for k, v in (one.get("model") or {}).items() if k not in ("placement", "options")}
    placements = tuple(parse(text) for text in config.placements)
    labels = [placement.label() for placement in placements]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"`compare.placements` has {label} twice; give each once")
    variants, values = {}, {}
    for chosen in itertools.product(*config.vary.values()):
        given = dict(zip(config.vary, chosen, strict=True))
        changed = data
        for key, value in given.items():
            changed = recipe.merged(changed, recipe.nested(key, value))
        name = ",".join(f"{key}={value}" for key, value in given.items())
        variants[name], values[name] = recipe.build(RunConfig, changed).filled(), given
    return Sweep(
        axes=config,
        variants=variants,
        values=values,
        placements=placements,
        rates=tuple(config.lrs or _rates(config, placement, lr) for placement in placements),
        is_recipe=not config.vary and _tuned_for(own) == _tuned_for(data) and not _other_text(own, data),
    )


def preset_names() -> list[str]:
    """Names of the recipes that come with geonorm."""
    return sorted(path.name.removesuffix(".yaml") for path in _recipes().iterdir() if path.name.endswith(".yaml"))


def preset_path(name: str) -> Path:
    """Path of a recipe that comes with geonorm.

    Raises:
        UserError: unknown name.
    """
    if name not in preset_names():
        raise unknown("preset", name, preset_names())
    return _recipes() / f"{name}.yaml"


def _recipes() -> Path:
    return Path(str(resources.files("geonorm") / "recipes"))


def _rates(config: SweepConfig, placement: Placement, lr: float | None) -> tuple[float, ...]:
    for key in (placement.label(), placement.name):
        if key in config.lrs_by_placement:
            return config.lrs_by_placement[key]
    if lr is not None and not config.lrs_by_placement:
        return (lr,)
    raise UserError(f"the recipe has no learning rate for placement {placement.name!r}; give --lrs")


def _tuned_for(data: dict[str, Any]) -> dict[str, Any]:
    flat = recipe.flat(recipe.resolved(recipe.build(RunConfig, data).filled()))
    return {key: value for key, value in flat.items() if not key.startswith(_NOT_TUNED_FOR)}


def _other_text(own: dict[str, Any], data: dict[str, Any]) -> bool:
    keys = ("sources", "corpus")
    return any((own.get("data") or {}).get(key) != (data.get("data") or {}).get(key) for key in keys)
