"""``geonorm convert``: load, convert, measure before and after, save."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from geonorm.conversion.calibrate import METHODS
from geonorm.conversion.convert import check_convertible, convert_model
from geonorm.conversion.held_out import split_source, windows_of_side
from geonorm.data.sources import FileSource
from geonorm.data.split import TRAIN, VAL
from geonorm.data.standard_library import StandardLibrarySource
from geonorm.errors import UserError, check_folder_path, unknown
from geonorm.model_options import ConvertConfig
from geonorm.models import rewire
from geonorm.models.compat import quiet_transformers
from geonorm.models.loading import load_model
from geonorm.models.saving import model_card, whole_folder, write_card
from geonorm.models.tokens import check_ids, check_length
from geonorm.ops import which
from geonorm.placements import available, create
from geonorm.progress_bar import ProgressBar
from geonorm.ranges import check_ranges
from geonorm.storage import finite, write_json
from geonorm.training.validation import token_losses, undisturbed

RECORD = "conversion.json"
_EVAL_BATCH = 4


def convert(config: ConvertConfig, console: Console) -> dict[str, Any]:
    """Convert a model and save it with its tokenizer, a record of the conversion and a README.

    Returns:
        The record: ``model``, ``to``, ``step`` (implementation), ``settings``, ``loss_before`` and ``loss_after`` (nats
        a token on held-out text), ``sublayers`` (angle, across and alpha of each), ``fold_error``.

    Raises:
        UserError: a target that a trained model cannot be converted to, a folder that holds something, or what loading
            and converting raise.
    """
    _check(config)
    source = FileSource(config.text, config.text_column) if config.text else StandardLibrarySource()
    with ProgressBar(console) as bar:
        bar.begin(f"loading {config.model}")
        model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
        check_convertible(model)
        record: dict[str, Any] = {
            "model": config.model,
            "to": config.to,
            "step": which(torch.empty(1, 1, device=model.device)),
            "settings": finite(dataclasses.asdict(config)),
        }
        if config.to == "pre":
            rewire(model, "pre")
            bar.say(
                "a stock Pre-Norm model already has placement 'pre': saved with the class changed and no bit of its "
                "weights"
            )
        else:
            record |= _convert(config, model, tokenizer, source, bar)
            bar.say(
                f"loss on held-out text: {record['loss_before']:.4f} before, {record['loss_after']:.4f} after, "
                f"{record['chance']:.4f} by guessing (nats a token)"
            )
        _save(model, tokenizer, config.out, record)
        bar.say(f"saved: {config.out}")
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
    check_ranges(config)
    check_folder_path("out", config.out)
    if config.out.exists() and any(config.out.iterdir()):
        raise UserError(f"`out` {config.out} exists and is not empty; give a new folder")


def _retraction(config: ConvertConfig) -> str | float:
    try:
        return float(config.retraction)
    except ValueError:
        return config.retraction


def _convert(config: ConvertConfig, model: Any, tokenizer: Any, source: Any, bar: ProgressBar) -> dict[str, Any]:
    check_length(model, config.length, config.length, config.model)
    bar.begin("reading text")
    split = split_source(source)
    text = {"source": source, "split": split, "tokenizer": tokenizer, "length": config.length + 1}
    held = windows_of_side(**text, side=VAL, num_windows=config.eval_windows)
    ids = windows_of_side(**text, side=TRAIN, num_windows=config.windows)[:, :-1]
    for tokens in (held, ids):
        check_ids(model, tokens)
    for note in source.notes():
        bar.say(note)
    bar.begin("measuring the loss before", len(held), "windows")
    before = _loss(model, held, bar.advance)
    bar.begin(f"calibrating on {len(ids)} windows")
    found = convert_model(
        model,
        ids.to(model.device),
        method=config.method,
        retraction=_retraction(config),
        max_angle=config.max_angle,
        learnable=config.learnable,
    )
    bar.begin("measuring the loss after", len(held), "windows")
    return {
        "text": source.names,
        "calibration_tokens": ids.numel(),
        "held_out_tokens": held.numel() - len(held),
        "loss_before": before,
        "loss_after": _loss(model, held, bar.advance),
        "chance": math.log(model.config.vocab_size),
        "fold_error": found.fold_error,
        "sublayers": [dataclasses.asdict(entry) for entry in found.sublayers],
    }


def _loss(model: Any, windows: Tensor, advance: Callable[[float], None]) -> float:
    """Mean nats a token of windows ``[n, length + 1]``, summed in float64."""
    losses = []
    with undisturbed(model):
        for some in windows.split(_EVAL_BATCH):
            losses.append(token_losses(model, some.to(model.device)).cpu().numpy())
            advance(len(some))
    return float(np.concatenate(losses).astype(np.float64).mean())


def _save(model: Any, tokenizer: Any, out: Path, record: dict[str, Any]) -> None:
    with whole_folder(out) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, record)
        write_card(partial, lambda: f"---\n{model_card(model).data}\n---\n\n{_readme(record, out)}")


def _readme(record: dict[str, Any], out: Path) -> str:
    made = ""
    if "loss_after" in record:
        settings = record["settings"]
        losses = f"{record['loss_before']:.4f} before, {record['loss_after']:.4f} after"
        made = f"""
Loss on held-out text, nats a token: {losses} ({record["held_out_tokens"]:,} tokens; guessing gives \
{record["chance"]:.4f}).

This is a start to train on from, not a finished model. The gains of the norms before the sub-layers are folded into \
the weights that read them; each sub-layer has one step size, chosen so that its median angle over \
{record["calibration_tokens"]:,} tokens is what it was (method `{settings["method"]}`, retraction \
`{settings["retraction"]}`, limit of the angle: {
            settings["max_angle"]
        }). What Pre-Norm does differently for tokens whose \
stream is longer or shorter than the median is lost. Step sizes, angles and the command's settings are in `{RECORD}`.
"""
    return f"""# {out.name}

{Path(record["model"]).name}, rewired from Pre-Norm to `{record["to"]}` by geonorm.
{made}
```python
import geonorm  # makes the class known to transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{out}")
tokenizer = AutoTokenizer.from_pretrained("{out}")
```

Any trainer trains it like the model that it came from. Gains, biases and step sizes should have no weight decay \
(`geonorm.training.parameter_groups` sorts them). Begin with a warm-up: the loss falls most in the first steps. \
`geonorm inspect`, `eval` and `generate` take the folder as it is.
"""
