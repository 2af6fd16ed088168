"""``geonorm compare``."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from geonorm import signals
from geonorm.cli.option_types import FROM_RECIPE, Data, Overrides, Recipes, arg
from geonorm.cli.text import data_overrides
from geonorm.errors import UserError, check_count, check_positive
from geonorm.ranges import FACTOR, SEED, Count, Number

_Floats = Annotated[tuple[float, ...], tyro.conf.arg(help_behavior_hint=f"(default: {FROM_RECIPE})")]
_Ints = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint=f"(default: {FROM_RECIPE})")]
_Jobs = Annotated[int | None, arg("INT", "all cores or GPUs; with ray, what the cluster takes")]
_Ranks = Annotated[int | None, arg("INT", "1, with ray one a GPU")]

# Not part of what the results rest on.
_LEFT_OUT = ("resume", "jobs", "address", "retries")


@dataclasses.dataclass(frozen=True)
class Compare:
    """Train one small model for every placement under equal conditions, and report."""

    words: Overrides = ()
    """Values of the recipe to change, such as steps=100 model.hidden_size=64, before the options; geonorm train --show
    lists all of them"""
    preset: Annotated[str | None, arg("NAME", "demo without --config")] = None
    """A recipe that comes with geonorm: demo, small, field (every placement) or tiny"""
    config: Recipes = ()
    """YAML recipe, as for train; its section `compare` says what is varied"""
    placements: Annotated[tuple[str, ...], arg("NAME [NAME ...]", FROM_RECIPE)] = ()
    """Placements, each NAME or NAME:OPTION=VALUE,... such as geonorm:decay=sqrt"""
    lrs: Annotated[_Floats, FACTOR] = ()
    """Peak learning rates to try, the same for every placement"""
    seeds: Annotated[_Ints, SEED] = ()
    """Seeds. With several rates the first chooses each placement's rate and does not report, the others report"""
    vary: Annotated[tuple[str, ...], arg("KEY=A,B [KEY=A,B ...]", "none")] = ()
    """Further keys with the values that each takes, such as optimizer.name=adamw,muon; every combination is compared"""
    data: Data = ()
    """A folder made by geonorm prepare, or what that command takes: files, folders, patterns, hf:// datasets"""
    out: Path = Path("runs/compare")
    """Folder for results, report and one folder a trial"""
    resume: bool = False
    """Continue in a folder that exists: finished trials are kept, others go on from their last checkpoint"""
    refine: bool = True
    """After the grid, try the neighbours of each best rate, a factor of sqrt(2) away; without them no verdict"""
    full_grid: bool = False
    """Run every learning rate with every seed"""
    jobs: Annotated[_Jobs, Count()] = None
    """Trials side by side"""
    ranks_per_trial: Annotated[_Ranks, Count()] = None
    """Processes that train a trial together, with ray on as few machines as hold them; parallel=fsdp cuts it up"""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: tasks on a Ray cluster whose machines share the folders"""
    address: Annotated[str | None, arg("HOST:PORT|auto", "one of its own on this machine")] = None
    """The running Ray cluster"""
    cpus_per_trial: Annotated[int, Count()] = 1
    """CPUs a trial, a thread each (ray)"""
    gpus_per_trial: Annotated[float, Number(0, 1e6)] = 0
    """GPUs a trial (ray); below 1 several trials share one"""
    retries: Annotated[int, Count(0)] = 2
    """Times that a trial goes on elsewhere after its worker or machine was lost (ray)"""

    def run(self) -> int:
        """See :class:`Command`."""
        from rich.console import Console

        from geonorm.report import print_summary, write_report
        from geonorm.sweep.axes import make_sweep
        from geonorm.sweep.comparison import Machines
        from geonorm.sweep.comparison import compare as run

        preset = self.preset or (None if self.config else "demo")
        overrides = [*self.words, *data_overrides(self.data, self.words)]
        sweep = make_sweep(self.config, overrides, preset=preset, axes=axes_of(self))
        ray, ranks = _ray(self)
        console = Console()
        signals.begin()
        try:
            machines = Machines(self.jobs, ranks, ray)
            results = run(sweep, self.out, machines, console, command=command_of(self), resume=self.resume)
        except KeyboardInterrupt:
            console.print("what is done is kept; the same command with --resume goes on from it")
            raise
        print_summary(results, console)
        console.print(f"report: {write_report(self.out)}", markup=False, highlight=False, soft_wrap=True)
        return 1 if any(trial.status == "failed" for trial in results.trials) else 0


def axes_of(options: Compare) -> dict[str, Any]:
    """What the options say of the section `compare`."""
    from geonorm.training.recipe import parse_yaml

    axes: dict[str, Any] = {}
    for name in ("placements", "lrs", "seeds"):
        if given := getattr(options, name):
            axes[name] = list(given)
    for name, default in (("refine", True), ("full_grid", False)):
        if getattr(options, name) is not default:
            axes[name] = getattr(options, name)
    vary: dict[str, Any] = {}
    for text in options.vary:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise UserError(f"`vary` must be KEY=A,B such as optimizer.name=adamw,muon, got {text!r}")
        if key in vary:
            raise UserError(f"`vary` has {key} twice; give all its values together")
        vary[key] = parse_yaml(f"[{values}]", f"`vary` {text!r}")
    return axes | ({"vary": vary} if vary else {})


def _ray(options: Compare) -> tuple[Any, int]:
    """Options of the Ray cluster, None for this machine alone, and the ranks of a trial."""
    from geonorm.sweep.ray_ranks import RayOptions

    if options.executor == "local":
        for name in ("address", "cpus_per_trial", "gpus_per_trial", "retries"):
            if getattr(options, name) != Compare.__dataclass_fields__[name].default:
                raise UserError(f"`{name}` is for Ray; add --executor ray, which runs on one machine too")
        return None, options.ranks_per_trial or 1
    cpus = check_count("cpus_per_trial", options.cpus_per_trial)
    gpus = check_positive("gpus_per_trial", options.gpus_per_trial) if options.gpus_per_trial else 0.0
    if gpus > 1 and gpus % 1:
        raise UserError(f"`gpus_per_trial` above 1 must be a whole number, got {gpus:g}")
    ranks = check_count("ranks_per_trial", options.ranks_per_trial or max(1, int(gpus)))
    if gpus and ranks != max(1, int(gpus)):
        raise UserError(f"`ranks_per_trial` must be one a GPU, {max(1, int(gpus))}, got {ranks}")
    if ranks > cpus and not gpus:
        raise UserError(f"`ranks_per_trial` {ranks} needs as many --cpus-per-trial, got {cpus}")
    return RayOptions(options.address, cpus, gpus, ranks, check_count("retries", options.retries, 0)), ranks


def command_of(options: Compare) -> str:
    """The command that repeats the comparison."""
    from geonorm.provenance import command_line

    return command_line(
        "compare", options, positional={"words"}, without=_LEFT_OUT, always={"out"}, repeated={"config"}
    )
