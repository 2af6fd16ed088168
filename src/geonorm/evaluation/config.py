"""Options of ``geonorm eval`` and ``geonorm generate``. Imports no library of models, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from geonorm.ranges import POSITIVE, SEED, Count, Number

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
_Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")]
_Paths = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="")]
_Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 1024, or the model's limit)")]
_Half = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: half of --length)")]
_Fewshot = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: what the task says)")]
_Limit = Annotated[float | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: all)")]
_Dtype = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as saved)")]
_Out = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")]


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluate a model, stock or rewired: tasks of lm-eval, perplexity and bits per byte on text."""

    model: Model
    """A folder, a GGUF file or a Hub name"""
    tasks: _Texts = ()
    """Tasks of lm-eval: names, patterns, or YAML files"""
    include_path: _Paths = ()
    """Folders with task files of your own; Python that they name is run"""
    limit: Annotated[_Limit, POSITIVE] = None
    """Examples of each task, or a share of them below 1"""
    num_fewshot: Annotated[_Fewshot, Count(0)] = None
    """Solved examples before each question"""
    text: _Paths = ()
    """Text, jsonl or parquet files, or folders of them, to score token by token"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    max_documents: Annotated[
        Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")], Count()
    ] = None
    """Read only the first so many documents"""
    length: Annotated[_Int, Count()] = None
    """Most tokens that a window over the text reads"""
    stride: Annotated[_Half, Count()] = None
    """Tokens that the window moves by: smaller gives every token more context and takes longer"""
    batch: Annotated[int, Count()] = 4
    """Windows or requests at a time; changes speed and memory alone"""
    dtype: _Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""
    out: _Out = None
    """JSON file for the results"""


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Write on after prompts, printed as it comes."""

    model: Model
    """A folder, a GGUF file or a Hub name"""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]", help_behavior_hint="")] = ()
    """Texts to write on from; `-`, or none at all, reads standard input as one prompt"""
    max_new_tokens: Annotated[int, Count()] = 100
    """Most tokens after each prompt"""
    temperature: Annotated[float, Number(0, 1e6)] = 0.8
    """Divides the logits; 0 takes the likeliest token each time"""
    top_p: Annotated[float, Number(0, 1, above=True)] = 0.95
    """Draw from the likeliest tokens whose probabilities reach this sum"""
    beams: Annotated[int, Count()] = 1
    """Beams to search with; more than 1 prints when all is written"""
    seed: Annotated[int, SEED] = 0
    """Seed of the draws"""
    chat: bool = False
    """Put each prompt into the model's chat template"""
    parse_special: bool = False
    """Read spellings of special tokens in the prompts, such as <|im_end|>, as those tokens and not as text"""
    dtype: _Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""
