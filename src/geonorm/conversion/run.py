"""``geonorm convert``: load, convert, measure before and after, save."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from geonorm.conversion.calibrate import METHODS
from geonorm.conversion.config import ConvertConfig
from geonorm.conversion.convert import check_convertible, convert_model
from geonorm.conversion.text import split_source, windows_of_side
from geonorm.data.sources import FileSource
from geonorm.data.split import TRAIN, VAL
from geonorm.data.standard_library import StandardLibrarySource
from geonorm.errors import UserError, check_count, check_folder_path, unknown
from geonorm.models import rewire
from geonorm.models.card import model_card, save_card
from geonorm.models.ids import check_ids
from geonorm.models.load import load_model, quiet_transformers
from geonorm.models.save import whole_folder
from geonorm.ops import which
from geonorm.placements import available, create
from geonorm.storage import write_json
from geonorm.training.evaluation import evaluate

RECORD = "conversion.json"
_EVAL_BATCH = 4


def run_convert(config: ConvertConfig, console: Console) -> dict[str, Any]:
    """Convert a model and save it with its tokenizer, a record of the conversion and a README.

    Returns:
        The record: ``model``, ``to``, ``step`` (implementation), ``settings``, ``loss_before`` and ``loss_after`` (nats
        a token on held-out text), ``sublayers`` (angle, across and alpha of each), ``fold_error``.

    Raises:
        UserError: a target that a trained model cannot be converted to, a folder that holds something, or what loading
            and converting raise.
    """
    _check(config)
    say = _Printer(console)
    source = FileSource(config.text, config.text_column) if config.text else StandardLibrarySource()
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    check_convertible(model)
    record: dict[str, Any] = {
        "model": config.model,
        "to": config.to,
        "step": which(torch.empty(1, 1, device=model.device)),
        "settings": _plain(dataclasses.asdict(config)),
    }
    if config.to == "pre":
        rewire(model, "pre")
        say(
            "a stock Pre-Norm model already has placement 'pre': saved with the class changed and no bit of its weights"
        )
    else:
        limit = getattr(model.config, "max_position_embeddings", None) or math.inf
        if config.length > limit:
            raise UserError(
                f"`length` {config.length} is more than the {limit} positions of {config.model}; give at most {limit}"
            )
        split = split_source(source)
        text = {"source": source, "split": split, "tokenizer": tokenizer, "length": config.length + 1}
        held = windows_of_side(**text, side=VAL, num_windows=config.eval_windows)
        ids = windows_of_side(**text, side=TRAIN, num_windows=config.windows)[:, :-1]
        for tokens in (held, ids):
            check_ids(model, tokens)
        for note in source.notes():
            say(note)
        before = _loss(model, held)
        found = convert_model(
            model,
            ids.to(model.device),
            method=config.method,
            retraction=_retraction(config),
            max_angle=config.max_angle,
            learnable=config.learnable,
        )
        after = _loss(model, held)
        record |= {
            "text": source.names,
            "calibration_tokens": ids.numel(),
            "held_out_tokens": held.numel() - len(held),
            "loss_before": before,
            "loss_after": after,
            "chance": math.log(model.config.vocab_size),
            "fold_error": found.fold_error,
            "sublayers": [dataclasses.asdict(entry) for entry in found.sublayers],
        }
        say(
            f"loss on held-out text: {before:.4f} before, {after:.4f} after, {record['chance']:.4f} by guessing "
            "(nats a token)"
        )
    _save(model, tokenizer, config.out, record)
    say(f"saved: {config.out}")
    return record


def _check(config: ConvertConfig) -> None:
    create(config.to)
    if config.to not in ("geonorm", "pre"):
        raise UserError(
            f"a trained model cannot be converted to {config.to!r}: its norms would have no trained gains and its "
            f"updates another size; --to takes geonorm or pre, geonorm.models.rewire any of {', '.join(available())}"
        )
    if config.method not in METHODS:
        raise unknown("calibration method", config.method, METHODS)
    create("geonorm", retraction=_retraction(config), max_angle=config.max_angle)
    check_folder_path("out", config.out)
    check_count("windows", config.windows)
    check_count("eval_windows", config.eval_windows)
    check_count("length", config.length, 2)
    if config.out.exists() and any(config.out.iterdir()):
        raise UserError(f"`out` {config.out} exists and is not empty; give a new folder")


def _retraction(config: ConvertConfig) -> str | float:
    try:
        return float(config.retraction)
    except ValueError:
        return config.retraction


def _loss(model: Any, windows: Tensor) -> float:
    # Bytes are not asked for; any positive numbers serve.
    num_bytes = np.ones(model.config.vocab_size, dtype=np.int64)
    return evaluate(model, windows.numpy(), num_bytes, batch=_EVAL_BATCH, precision="fp32").loss


def _save(model: Any, tokenizer: Any, out: Path, record: dict[str, Any]) -> None:
    with whole_folder(out) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, record)
        save_card(partial, lambda: f"---\n{model_card(model).data}\n---\n\n{_readme(record, out)}")


def _readme(record: dict[str, Any], out: Path) -> str:
    lines = [
        f"# {out.name}",
        "",
        f"{Path(record['model']).name}, rewired from Pre-Norm to `{record['to']}` by geonorm.",
        "",
    ]
    if "loss_after" in record:
        settings = record["settings"]
        lines += [
            f"Loss on held-out text, nats a token: {record['loss_before']:.4f} before, {record['loss_after']:.4f} "
            f"after ({record['held_out_tokens']:,} tokens; guessing gives {record['chance']:.4f}).",
            "",
            "This is a start to train on from, not a finished model. The gains of the norms before the sub-layers are "
            "folded into the weights that read them; each sub-layer has one step size, chosen so that its median angle "
            f"over {record['calibration_tokens']:,} tokens is what it was (method `{settings['method']}`, retraction "
            f"`{settings['retraction']}`, limit of the angle: {settings['max_angle']}). What Pre-Norm does differently "
            "for tokens whose stream is longer or shorter than the median is lost. Step sizes, angles and the "
            f"command's settings are in `{RECORD}`.",
            "",
        ]
    lines += [
        "```python",
        "import geonorm  # makes the class known to transformers",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{out}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{out}")',
        "```",
        "",
        "Any trainer trains it like the model that it came from. Gains, biases and step sizes should have no weight "
        "decay (`geonorm.training.parameter_groups` sorts them). Begin with a warm-up: the first steps mend most. "
        "`geonorm inspect`, `eval` and `generate` take the folder as it is.",
        "",
    ]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


class _Printer:
    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
