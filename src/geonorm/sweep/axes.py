"""From the options of ``geonorm compare`` to its trials."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from geonorm.errors import MAX_SEED, UserError, check_count, check_positive
from geonorm.experiments.cluster import ClusterOptions
from geonorm.experiments.config import CompareConfig
from geonorm.experiments.environment import num_cores
from geonorm.experiments.presets import Preset, preset
from geonorm.experiments.rates import best_lr, untried_neighbours
from geonorm.experiments.summary import Design
from geonorm.experiments.trials import Trial
from geonorm.models import ModelShape
from geonorm.placements import Placement, parse
from geonorm.training import TrainSettings


@dataclasses.dataclass(frozen=True)
class CorpusKey:
    """What a trial has to know of its corpus; the tokenizer of a small corpus can end below the size asked for."""

    fingerprint: str
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison with every value decided.

    With several rates a placement, the first seed chooses and the others report; with one, all seeds report.
    """

    config: CompareConfig
    preset: Preset
    placements: tuple[Placement, ...]
    rates: tuple[tuple[float, ...], ...]
    seeds: tuple[int, ...]
    shape: ModelShape
    training: TrainSettings
    vocab_size: int
    jobs: int
    cluster: ClusterOptions | None

    def settings(self) -> dict[str, Any]:
        """Every setting that all trials share, flat; two comparisons with equal settings can be set side by side."""
        training = dataclasses.asdict(self.training)
        del training["lr"], training["seed"]
        shape = {**dataclasses.asdict(self.shape), "mlp_width": self.shape.inner}
        return {**shape, **training, "betas": list(self.training.betas), "vocab_size": self.vocab_size}

    def resolved(self) -> dict[str, Any]:
        """The whole configuration as plain data, written beside the results."""
        return {
            "preset": self.config.preset,
            "data": [str(path) for path in self.config.data],
            "placements": [
                {"placement": p.name, "options": p.options(), "lrs": list(rates)}
                for p, rates in zip(self.placements, self.rates, strict=True)
            ],
            "seeds": list(self.seeds),
            "refine": self.config.refine,
            "full_grid": self.config.full_grid,
            "settings": self.settings(),
        }

    @property
    def selection_seed(self) -> int | None:
        """The seed that chooses the rates; None where there is nothing to choose."""
        return self.seeds[0] if any(len(rates) > 1 for rates in self.rates) else None

    @property
    def reporting_seeds(self) -> tuple[int, ...]:
        """Seeds whose losses are reported."""
        return self.seeds if self.selection_seed is None else self.seeds[1:]

    def rate_source(self) -> str:
        """Where the learning rates come from: ``"searched"`` here, ``"given"`` (one on the command line), or the
        preset's, ``"tuned"`` or ``"untuned"``; its rates count as tuned for its own model, training and text only, and
        where the seed that found them does not report.
        """
        if self.selection_seed is not None:
            return "searched"
        if self.config.lrs:
            return "given"
        kept = {name: getattr(self.preset.training, name) for name in ("eval_every", "eval_windows")}
        own = (
            self.shape == self.preset.shape
            and dataclasses.replace(self.training, **kept) == self.preset.training
            and self.vocab_size == self.preset.vocab_size
            and not self.config.data
            and self.preset.tuning_seed not in self.reporting_seeds
        )
        return "tuned" if self.preset.tuned and own else "untuned"

    def design(self, complete: bool) -> Design:
        """What the summary has to know; a rate that was found for another variant of a placement is not tuned."""
        tuned = self.preset.lrs.keys() if self.rate_source() == "tuned" else ()
        return Design(self.reporting_seeds, self.selection_seed, frozenset(tuned), complete)

    def command(self) -> str:
        """The command that repeats the comparison."""
        words = ["geonorm", "compare"]
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            if field.name in ("resume", "jobs", "address", "retries") or (
                value == field.default and field.name not in ("preset", "out")
            ):
                continue
            words.append(("--no-" if value is False else "--") + field.name.replace("_", "-"))
            if not isinstance(value, bool):
                words.extend(str(item) for item in (value if isinstance(value, tuple) else (value,)))
        return shlex.join(words)

    def first_trials(self, corpus: CorpusKey) -> list[Trial]:
        """Trials that need no earlier result."""
        most = max(len(rates) for rates in self.rates)
        return [
            self._trial(placement, rates[index], seed, corpus)
            for seed in self._first_seeds
            for index in range(most)
            for placement, rates in zip(self.placements, self.rates, strict=True)
            if index < len(rates)
        ]

    def refining_trials(self, results: list[dict[str, Any]], corpus: CorpusKey) -> list[Trial]:
        """Trials at untried neighbours, a factor of sqrt(2) away, of each searched placement's best rate so far."""
        seed = self.selection_seed
        if seed is None or not self.config.refine:
            return []
        trials = []
        for placement, rates in zip(self.placements, self.rates, strict=True):
            mine = [result for result in results if result["label"] == placement.label()]
            best = best_lr(mine, seed)
            if best is not None and len(rates) > 1:
                missing = untried_neighbours(best, {result["lr"] for result in mine})
                trials += [self._trial(placement, lr, one, corpus) for one in self._first_seeds for lr in missing]
        return trials

    def later_trials(self, results: list[dict[str, Any]], corpus: CorpusKey) -> list[Trial]:
        """Trials of the reporting seeds that have not run, each placement at the rate that the first seed chose."""
        later = [seed for seed in self.seeds if seed not in self._first_seeds]
        trials = []
        for placement in self.placements:
            mine = [result for result in results if result["label"] == placement.label()]
            lr = best_lr(mine, self.seeds[0])
            if lr is not None:
                trials += [self._trial(placement, lr, seed, corpus) for seed in later]
        return sorted(trials, key=lambda trial: later.index(trial.training.seed))

    @property
    def _first_seeds(self) -> tuple[int, ...]:
        return self.seeds if self.selection_seed is None or self.config.full_grid else self.seeds[:1]

    def _trial(self, placement: Placement, lr: float, seed: int, corpus: CorpusKey) -> Trial:
        training = dataclasses.replace(self.training, lr=lr, seed=seed)
        return Trial(placement.name, placement.options(), self.shape, training, corpus.vocab_size, corpus.fingerprint)


def make_plan(config: CompareConfig) -> Plan:
    """Fill a configuration from its preset and check it.

    Raises:
        UserError: an unknown preset, placement or option, a placement or rate or seed given twice, or a value out of
            range.
    """
    base = preset(config.preset)
    placements = tuple(parse(text) for text in config.placements or base.placements)
    _check_distinct("placements", [placement.label() for placement in placements])
    seeds = config.seeds or base.seeds
    _check_distinct("seeds", list(seeds))
    _check_distinct("lrs", list(config.lrs))
    for lr in config.lrs:
        check_positive("lrs", lr)
    for seed in seeds:
        check_count("seeds", seed, 0, MAX_SEED)
    shape = dataclasses.replace(base.shape, **_given(config, "width", "depth", "heads"))
    training = _given(
        config, "steps", "length", "batch", "accumulation", "warmup", "precision", "weight_decay", "eval_windows"
    )
    training |= _given(config, "eval_every")
    if config.steps is not None and config.warmup is None:
        training["warmup"] = max(0, check_count("steps", config.steps) // 10)
    if config.steps is not None and config.eval_every is None:
        training["eval_every"] = max(1, config.steps // 5)
    settings = dataclasses.replace(base.training, **training)
    jobs = config.jobs if config.jobs is not None else num_cores()
    return Plan(
        config=config,
        preset=base,
        placements=placements,
        rates=tuple(config.lrs or base.rates(placement) for placement in placements),
        seeds=seeds,
        shape=shape,
        training=settings,
        vocab_size=check_count("vocab_size", base.vocab_size if config.vocab_size is None else config.vocab_size, 257),
        jobs=check_count("jobs", jobs),
        cluster=_cluster(config, settings),
    )


def _cluster(config: CompareConfig, training: TrainSettings) -> ClusterOptions | None:
    """Options of the Ray cluster; None for this machine alone."""
    if config.executor == "local":
        for name in ("address", "cpus_per_trial", "gpus_per_trial", "ranks_per_trial", "parallel", "retries"):
            if getattr(config, name) != CompareConfig.__dataclass_fields__[name].default:
                raise UserError(f"`{name}` is for Ray; add --executor ray, which runs on one machine too")
        return None
    if config.executor != "ray":
        raise UserError(f"`executor` must be 'local' or 'ray', got {config.executor!r}")
    cpus = check_count("cpus_per_trial", config.cpus_per_trial)
    gpus = check_positive("gpus_per_trial", config.gpus_per_trial) if config.gpus_per_trial else 0.0
    if gpus > 1 and gpus % 1:
        raise UserError(f"`gpus_per_trial` above 1 must be a whole number, got {gpus:g}")
    ranks = check_count("ranks_per_trial", config.ranks_per_trial or max(1, int(gpus)))
    if gpus and ranks != max(1, int(gpus)):
        raise UserError(f"`ranks_per_trial` must be one a GPU, {max(1, int(gpus))}, got {ranks}")
    if ranks > cpus and not gpus:
        raise UserError(f"`ranks_per_trial` {ranks} needs as many --cpus-per-trial, got {cpus}")
    if config.parallel not in ("ddp", "fsdp"):
        raise UserError(f"`parallel` must be 'ddp' or 'fsdp', got {config.parallel!r}")
    if training.batch % (ranks * training.accumulation):
        raise UserError(
            f"`batch` {training.batch} is not a multiple of {ranks} ranks times `accumulation` {training.accumulation}"
        )
    return ClusterOptions(config.address, cpus, gpus, ranks, config.parallel, check_count("retries", config.retries, 0))


def _given(config: CompareConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


def _check_distinct(name: str, values: list) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"`{name}` has {value} twice; give each once")
