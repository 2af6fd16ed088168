"""Options of ``geonorm compare``. Imports neither transformers nor the data libraries, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

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
    tuple[str, ...], tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(default: the embedded corpus)")
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
    steps: _Int = None
    """Optimiser steps a trial"""
    lrs: _Floats = ()
    """Peak learning rates to try, the same for every placement"""
    seeds: _Ints = ()
    """Seeds. With several rates the first chooses each placement's rate and does not report, the others report"""
    refine: bool = True
    """After the grid, try the neighbours of each best rate, a factor of sqrt(2) away; without them no verdict"""
    full_grid: bool = False
    """Run every learning rate with every seed"""
    jobs: _Jobs = None
    """Trials side by side"""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: tasks on a Ray cluster"""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|auto", help_behavior_hint=_OWN_CLUSTER)] = None
    """The running Ray cluster"""
    cpus_per_trial: int = 1
    """CPUs a trial, a thread each (ray)"""
    gpus_per_trial: float = 0
    """GPUs a trial (ray); below 1 several trials share one"""
    ranks_per_trial: _Ranks = None
    """Processes that train a trial together, on one machine (ray)"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How they share the model: whole on each, or cut up (ray)"""
    retries: int = 2
    """Times that a trial starts anew after its worker or machine was lost (ray)"""
    width: _Int = None
    """Width of the model"""
    depth: _Int = None
    """Number of layers"""
    heads: _Int = None
    """Attention heads"""
    length: _Int = None
    """Tokens a window"""
    batch: _Int = None
    """Windows a step"""
    accumulation: _Int = None
    """Micro-batches that a step is split into"""
    warmup: _Int = None
    """Steps of warm-up; a tenth of --steps if that is given"""
    precision: _Text = None
    """fp32 or bf16 (autocast)"""
    weight_decay: _Float = None
    """AdamW's weight decay"""
    vocab_size: _Int = None
    """Size of the tokenizer trained on the data; 257 means bytes"""
    eval_windows: _Int = None
    """Windows of the validation text, and of the test text"""
    eval_every: _Int = None
    """Steps between evaluations"""
