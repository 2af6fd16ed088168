"""The commands behind the command line, one function each; its signature is its options."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Annotated

import tyro

from geonorm import signals
from geonorm.console import results_are_printed
from geonorm.conversion.config import ConvertConfig
from geonorm.data.options import PrepareConfig
from geonorm.evaluation.config import EvalConfig, GenerateConfig
from geonorm.experiments.config import CompareConfig
from geonorm.inspection.config import InspectConfig
from geonorm.ranges import check_ranges

_Appended = Annotated[tuple[Path, ...], tyro.conf.UseAppendAction]
_Parallel = Annotated[str | None, tyro.conf.arg(metavar="ddp|fsdp", help_behavior_hint="(default: as the recipe says)")]
_Data = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(default: as the recipe says)")
]
_RecipeWords = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|KEY=VALUE")]
_Overrides = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KEY=VALUE")]


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def compare(config: CompareConfig) -> int:
    """Train one small model for every placement under equal conditions, and report."""
    check_ranges(config)
    from rich.console import Console

    from geonorm.experiments.compare import compare as run
    from geonorm.report import parse_results, print_summary, write_report

    console = Console()
    signals.begin()
    try:
        results = parse_results(run(config, console))
    except KeyboardInterrupt:
        console.print("finished trials are kept; the same command with --resume goes on from them")
        raise
    print_summary(results, console)
    console.print(f"report: {write_report(config.out)}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(trial.status == "failed" for trial in results.trials) else 0


@tyro.conf.configure(tyro.conf.Positional)
def report(out: Path) -> int:
    """Write the report of a finished comparison again.

    Args:
        out: folder of the comparison.
    """
    from geonorm.report import write_report

    signals.begin()
    print(f"report: {write_report(out)}")
    return 0


def train(
    overrides: _Overrides = (),
    /,
    config: _Appended = (),
    data: _Data = (),
    out: Path = Path("runs/train"),
    resume: bool = False,
    overwrite: bool = False,
    parallel: _Parallel = None,
    show: bool = False,
) -> int:
    """Train one model: a recipe, resumable, on one or many GPUs.

    Args:
        overrides: values of the recipe to change, such as optimizer.lr=1e-3; --show lists all of them
        config: YAML recipe; given more than once, later ones win
        data: in place of the recipe's text: a folder made by geonorm prepare, or what that command takes
        out: folder for checkpoints, metrics and result
        resume: go on with what the folder holds; starts anew where it holds nothing
        overwrite: replace the run that the folder holds; files that it did not write stay
        parallel: over the ranks that torchrun started; short for parallel=...
        show: print the resolved recipe and stop
    """
    from geonorm.training.folder import read_config
    from geonorm.training.recipe import dump

    words = [*overrides, *([f"parallel={parallel}"] if parallel else [])]
    if data:
        words += ["data.corpus=null", f"data.sources={json.dumps(data)}"]
    resolved = read_config(out, config, words, resume=resume)
    if show:
        results_are_printed()
        print(dump(resolved), end="")
        return 0
    from geonorm.training.run import run

    return run(resolved, out, resume=resume, overwrite=overwrite)


def plan(
    words: _RecipeWords = (),
    /,
    config: _Appended = (),
    gpu: str = "h100",
    num_gpus: int = 1,
    mfu: float = 0.4,
) -> int:
    """Estimate what a recipe takes: parameters, tokens, operations, memory of a GPU, hours.

    Args:
        words: YAML recipes, later ones win, and values to change, such as data.length=2048
        config: the same as a recipe among the words, as for train
        gpu: kind of GPU, such as h100 or a100
        num_gpus: how many of them
        mfu: share of their peak to assume
    """
    from geonorm.sizing.show import plan_recipe

    results_are_printed()
    return plan_recipe(config, words, gpu, num_gpus, mfu)


def export(run: tyro.conf.Positional[Path], out: Path, step: int | None = None) -> int:
    """Write a run's model and tokenizer as a Hugging Face folder.

    Args:
        run: folder of the run
        out: folder to write
        step: checkpoint to take; the newest good one if left out
    """
    from geonorm.training.export import export as write

    signals.begin()
    write(run, out, step=step, say=print)
    return 0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def evaluate(config: EvalConfig) -> int:
    """Evaluate a model, stock or rewired: tasks of lm-eval, perplexity and bits per byte on text."""
    check_ranges(config)
    from rich.console import Console

    from geonorm.evaluation.run import run_eval

    signals.begin()
    if config.out is None:
        results_are_printed()
    run_eval(config, Console())
    return 0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def generate(config: GenerateConfig) -> int:
    """Write on after prompts, printed as it comes."""
    check_ranges(config)
    from geonorm.evaluation.run import run_generate

    signals.begin()
    results_are_printed()
    run_generate(config)
    return 0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def convert(config: ConvertConfig) -> int:
    """Turn a trained Pre-Norm model into a GeoNorm model to train on from."""
    check_ranges(config)
    from rich.console import Console

    from geonorm.conversion.run import run_convert

    signals.begin()
    run_convert(config, Console())
    return 0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def inspect_models(config: InspectConfig) -> int:
    """Run text through trained models and show what every sub-layer does to the residual stream."""
    check_ranges(config)
    from geonorm.report.inspection_page import inspect_and_report

    signals.begin()
    return inspect_and_report(config)


def placements() -> int:
    """List the placements with their options and defaults."""
    from geonorm.placements import REGISTRY

    results_are_printed()
    for name, kind in REGISTRY.items():
        options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(kind)) or "no options"
        summary = (inspect.getdoc(kind) or "").split("\n")[0].replace("``", "")
        print(f"{name}: {summary}\n    {options}")
    return 0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def prepare(config: PrepareConfig) -> int:
    """Turn text into packed token files, ready for --data of train and compare."""
    check_ranges(config)
    from rich.console import Console

    from geonorm.data import prepare as run
    from geonorm.data.progress import LiveProgress

    signals.begin()
    with LiveProgress(Console()) as show:
        run(list(config.sources) or None, report=show.say, progress=show, **config.arguments())
    return 0


COMMANDS = {
    "compare": compare,
    "train": train,
    "plan": plan,
    "export": export,
    "prepare": prepare,
    "report": report,
    "inspect": inspect_models,
    "placements": placements,
    "eval": evaluate,
    "generate": generate,
    "convert": convert,
}
