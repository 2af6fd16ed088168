"""Options of ``geonorm inspect``. Imports neither transformers nor the data libraries, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from geonorm.ranges import Count

_Models = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")]
_Paths = Annotated[
    tuple[Path, ...], tyro.conf.arg(help_behavior_hint="(default: documentation of Python's standard library)")
]
_Length = Annotated[
    int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 512, or the model's own limit if lower)")
]


@dataclasses.dataclass(frozen=True)
class InspectConfig:
    """Run text through trained models and show what every sub-layer does to the residual stream."""

    models: _Models
    """Folders, GGUF files or Hub names"""
    text: _Paths = ()
    """Text, jsonl or parquet files, or folders of them, to run through the models"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    windows: Annotated[int, Count()] = 4
    """Windows of text, from evenly spaced places"""
    length: Annotated[_Length, Count()] = None
    """Tokens a window"""
    special_tokens: bool = True
    """Start each window with what the tokenizer puts there by itself, such as a BOS token"""
    skip_first: Annotated[int, Count(0)] = 1
    """Tokens left out of the statistics at the start of each window; their influence is reported"""
    gradients: bool = False
    """Also measure the gradient norm of each block (a backward pass: about three times the time, twice the memory)"""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default as saved"""
    device: str = "cpu"
    """Where the models run, such as cuda"""
    out: Path = Path("runs/inspect")
    """Folder for the report, the figures and the numbers"""
    overwrite: bool = False
    """Replace an inspection that is there"""
