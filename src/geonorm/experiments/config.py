"""Options of ``geonorm compare``. Imports neither transformers nor the data libraries, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from geonorm.ranges import FACTOR, SEED, Count, Number

_FROM_PRESET = "(default: from the preset)"
_Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_FROM_PRESET)]
_Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_FROM_PRESET)]
_Text = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint=_FROM_PRESET)]
_Floats = Annotated[tuple[float, ...], tyro.conf.arg(help_behavior_hint=_FROM_PRESET)]
_Ints = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint=_FROM_PRESET)]
_Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint=_FROM_PRESET)]
_Jobs = Annotated[
    int | None,
    tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores; with ray, what the cluster takes)"),
]
_Ranks = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a GPU)")]
_OWN_CLUSTER = "(default: one of its own on this machine)"
_Sources = Annotated[
    tuple[str, ...],
    tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(default: the standard-library corpus)"),
]


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Train one small model for every placement under equal conditions, and report.

    What is left out comes from the preset.
    """

    placements: _Texts = ()
    """Placements, each NAME or NAME:OPTION=VALUE,... such as geonorm:decay=sqrt"""
    data: _Sources = ()
    """A folder made by geonorm prepare, or what that command takes: files, folders, patterns, hf:// datasets"""
    preset: str = "demo"
    """demo, small or tiny"""
    out: Path = Path("runs/compare")
    """Folder for results, report and one folder a trial"""
    resume: bool = False
    """Continue in a folder that exists: finished trials are kept"""
    steps: Annotated[_Int, Count()] = None
    """Optimiser steps a trial"""
    lrs: Annotated[_Floats, FACTOR] = ()
    """Peak learning rates to try, the same for every placement"""
    seeds: Annotated[_Ints, SEED] = ()
    """Seeds. With several rates the first chooses each placement's rate and does not report, the others report"""
    refine: bool = True
    """After the grid, try the neighbours of each best rate, a factor of sqrt(2) away; without them no verdict"""
    full_grid: bool = False
    """Run every learning rate with every seed"""
    jobs: Annotated[_Jobs, Count()] = None
    """Trials side by side"""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: tasks on a Ray cluster"""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|auto", help_behavior_hint=_OWN_CLUSTER)] = None
    """The running Ray cluster"""
    cpus_per_trial: Annotated[int, Count()] = 1
    """CPUs a trial, a thread each (ray)"""
    gpus_per_trial: Annotated[float, Number(0, 1e6)] = 0
    """GPUs a trial (ray); below 1 several trials share one"""
    ranks_per_trial: Annotated[_Ranks, Count()] = None
    """Processes that train a trial together, on one machine (ray)"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How they share the model: whole on each, or cut up (ray)"""
    retries: Annotated[int, Count(0)] = 2
    """Times that a trial starts anew after its worker or machine was lost (ray)"""
    width: Annotated[_Int, Count()] = None
    """Width of the model"""
    depth: Annotated[_Int, Count(1, 10_000)] = None
    """Number of layers"""
    heads: Annotated[_Int, Count()] = None
    """Attention heads"""
    length: Annotated[_Int, Count()] = None
    """Tokens a window"""
    batch: Annotated[_Int, Count()] = None
    """Windows a step"""
    accumulation: Annotated[_Int, Count()] = None
    """Micro-batches that a step is split into"""
    warmup: Annotated[_Int, Count(0)] = None
    """Steps of warm-up; a tenth of --steps if that is given"""
    precision: _Text = None
    """fp32 or bf16 (autocast)"""
    weight_decay: Annotated[_Float, Number(0, 1e6)] = None
    """AdamW's weight decay"""
    vocab_size: Annotated[_Int, Count(257)] = None
    """Size of the tokenizer trained on the data; 257 means bytes"""
    eval_windows: Annotated[_Int, Count()] = None
    """Windows of the validation text, and of the test text"""
    eval_every: Annotated[_Int, Count()] = None
    """Steps between evaluations"""
