"""Options of the commands on trained models: ``inspect``, ``convert``, ``eval`` and ``generate``.

Imports neither transformers nor the data libraries, so that help appears soon.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from geonorm.ranges import POSITIVE, SEED, Count, Number


def _arg(metavar: str, default: str = "") -> object:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


_Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
_Models = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")]
_Paths = Annotated[tuple[Path, ...], _arg("PATH [PATH ...]")]
_Dtype = Annotated[str | None, _arg("NAME", "as saved")]


@dataclasses.dataclass(frozen=True)
class InspectConfig:
    """Run text through trained models and show what every sub-layer does to the residual stream."""

    models: _Models
    """Folders, GGUF files or Hub names"""
    text: Annotated[tuple[Path, ...], _arg("PATH [PATH ...]", "documentation of Python's standard library")] = ()
    """Text, jsonl or parquet files, or folders of them, to run through the models"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    windows: Annotated[int, Count()] = 4
    """Windows of text, from evenly spaced places"""
    length: Annotated[int | None, Count(), _arg("INT", "512, or the model's own limit if lower")] = None
    """Tokens a window"""
    special_tokens: bool = True
    """Start each window with what the tokenizer puts there by itself, such as a BOS token"""
    skip_first: Annotated[int, Count(0)] = 1
    """Tokens left out of the statistics at the start of each window; their influence is reported"""
    gradients: bool = False
    """Also measure the gradient norm of each block (a backward pass: about three times the time, twice the memory)"""
    dtype: _Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the models run, such as cuda"""
    out: Path = Path("runs/inspect")
    """Folder for the report, the figures and the numbers"""
    overwrite: bool = False
    """Replace an inspection that is there"""


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Turn a trained Pre-Norm model into a GeoNorm model to train on from."""

    model: _Model
    """A folder, a GGUF file or a Hub name: a stock decoder with RMSNorm before its sub-layers"""
    out: Path
    """Folder for the converted model; it must not exist, or be empty"""
    to: str = "geonorm"
    """Placement: geonorm, or pre, which changes nothing but the class"""
    text: Annotated[tuple[Path, ...], _arg("PATH [PATH ...]", "the standard-library corpus")] = ()
    """Text, jsonl or parquet files, or folders of them, to calibrate on and to measure the loss with"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    method: str = "sequential"
    """Where step sizes are taken from: sequential (the converted model so far) or stock (the model as it was)"""
    retraction: str = "projection"
    """projection (Pre-Norm's own law at one length of the stream), exponential, cayley or a number p"""
    max_angle: Annotated[float | None, POSITIVE, _arg("RADIANS", "no limit")] = None
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


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluate a model, stock or rewired: tasks of lm-eval, perplexity and bits per byte on text."""

    model: _Model
    """A folder, a GGUF file or a Hub name"""
    tasks: Annotated[tuple[str, ...], _arg("NAME [NAME ...]")] = ()
    """Tasks of lm-eval: names, patterns, or YAML files"""
    include_path: _Paths = ()
    """Folders with task files of your own; Python that they name is run"""
    limit: Annotated[float | None, POSITIVE, _arg("NUMBER", "all")] = None
    """Examples of each task, or a share of them below 1"""
    num_fewshot: Annotated[int | None, Count(0), _arg("INT", "what the task says")] = None
    """Solved examples before each question"""
    text: _Paths = ()
    """Text, jsonl or parquet files, or folders of them, to score token by token"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    max_documents: Annotated[int | None, Count(), _arg("INT", "all")] = None
    """Read only the first so many documents"""
    length: Annotated[int | None, Count(), _arg("INT", "1024, or the model's limit")] = None
    """Most tokens that a window over the text reads"""
    stride: Annotated[int | None, Count(), _arg("INT", "half of --length")] = None
    """Tokens that the window moves by: smaller gives every token more context and takes longer"""
    batch: Annotated[int, Count()] = 4
    """Windows or requests at a time; changes speed and memory alone"""
    dtype: _Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""
    out: Annotated[Path | None, _arg("FILE", "none")] = None
    """JSON file for the results"""


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Write on after prompts, printed as it comes."""

    model: _Model
    """A folder, a GGUF file or a Hub name"""
    prompt: Annotated[tuple[str, ...], _arg("TEXT [TEXT ...]")] = ()
    """Texts to write on from; `-`, or none at all, reads standard input as one prompt"""
    max_new_tokens: Annotated[int, Count()] = 100
    """Most tokens after each prompt"""
    temperature: Annotated[float, Number(0, 1e6)] = 0.8
    """Divides the logits; 0 takes the likeliest token each time"""
    top_p: Annotated[float, Number(0, 1, above=True)] = 0.95
    """Draw from the likeliest tokens whose probabilities reach this sum"""
    num_beams: Annotated[int, Count(), tyro.conf.arg(name="beams")] = 1
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
