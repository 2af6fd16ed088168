"""Options of ``geonorm convert``. Imports neither transformers nor the data libraries, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from geonorm.ranges import POSITIVE, Count

_Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
_Paths = Annotated[
    tuple[Path, ...],
    tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(default: the standard-library corpus)"),
]
_Dtype = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as saved)")]
_Angle = Annotated[float | None, tyro.conf.arg(metavar="RADIANS", help_behavior_hint="(default: no limit)")]


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Turn a trained Pre-Norm model into a GeoNorm model to train on from."""

    model: _Model
    """A folder, a GGUF file or a Hub name: a stock decoder with RMSNorm before its sub-layers"""
    out: Path
    """Folder for the converted model; it must not exist, or be empty"""
    to: str = "geonorm"
    """Placement: geonorm, or pre, which changes nothing but the class"""
    text: _Paths = ()
    """Text, jsonl or parquet files, or folders of them, to calibrate on and to measure the loss with"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    method: str = "sequential"
    """Where step sizes are taken from: sequential (the converted model so far) or stock (the model as it was)"""
    retraction: str = "projection"
    """projection (Pre-Norm's own law at one length of the stream), exponential, cayley or a number p"""
    max_angle: Annotated[_Angle, POSITIVE] = None
    """Limit of one step's angle; trained models' first layers move far, so there is none by default"""
    learnable: bool = False
    """Make the step sizes trainable"""
    windows: Annotated[int, Count()] = 16
    """Windows to calibrate on, run at once"""
    eval_windows: Annotated[int, Count()] = 32
    """Windows held out, from other documents, to measure the loss on before and after"""
    length: Annotated[int, Count(2)] = 256
    """Tokens a window"""
    dtype: _Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""
