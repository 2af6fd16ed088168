"""``geonorm inspect``: load models, measure each on the same text, and keep the numbers."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import geonorm
from geonorm.errors import UserError, check_count, check_folder_path
from geonorm.inspection.config import InspectConfig
from geonorm.inspection.laws import LawFits
from geonorm.inspection.measure import QUANTITIES, Inspection, inspect_model
from geonorm.inspection.text import Text, TokenWindows, make_windows, read_text
from geonorm.models.load import load_model
from geonorm.models.source import check_source
from geonorm.ops import which
from geonorm.storage import write_json

RESULTS = "inspection.json"
FORMAT = 1
DEFAULT_LENGTH = 512


def run(config: InspectConfig, console: Console) -> dict[str, Any]:
    """Inspect every model and write ``inspection.json``.

    Returns:
        what the file holds; ``docs/unification.md`` describes it.

    Raises:
        UserError: an option out of range, a folder that holds something already, a model or text that cannot be read.
            Everything that can be checked without a model is checked before the first one is loaded.
    """
    for name, least in (("windows", 1), ("skip_first", 0)):
        check_count(name, getattr(config, name), least)
    if config.length is not None:
        check_count("length", config.length, config.skip_first + 2)
    check_folder(config.out, config.overwrite)
    names = model_names(config.models)
    for source in config.models:
        check_source(source)
    text = read_text(config.text, config.text_column)
    for note in text.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    models = []
    for source, name in zip(config.models, names, strict=True):
        if console.is_terminal:
            with console.status(f"inspecting {name}", spinner="line"):
                models.append(_inspect_source(source, name, text, config))
        else:
            console.print(f"inspecting {name}", markup=False, highlight=False, soft_wrap=True)
            models.append(_inspect_source(source, name, text, config))
    results = {
        "format": FORMAT,
        "text": {
            "name": text.name, "characters": len(text.text), "cut": text.cut, "sha256": text.digest,
        },
        "settings": {"windows": config.windows, "length": config.length, "skip_first": config.skip_first,
                     "special_tokens": config.special_tokens, "gradients": config.gradients},
        "models": models,
        "command": command_line(config),
        "environment": _environment(config.device),
    }  # fmt: skip
    config.out.mkdir(parents=True, exist_ok=True)
    write_json(config.out / RESULTS, results)
    return results


def check_folder(out: Path, overwrite: bool) -> None:
    """Check that results can go into a folder.

    Raises:
        UserError: it is a file or lies under one, or holds something that ``overwrite`` does not allow to replace.
    """
    check_folder_path("out", out)
    if not out.exists() or not any(out.iterdir()):
        return
    try:
        found = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"format", "models", "text"} <= set(found):
        raise UserError(f"`out` {out} holds files that are no inspection; name another folder")
    if not overwrite:
        raise UserError(f"`out` {out} holds an inspection; add --overwrite to replace it, or name another folder")


def model_names(sources: tuple[str, ...]) -> list[str]:
    """A short name for each source: the last part of its path, with more parts where that is not unique.

    Raises:
        UserError: none, or the same one twice.
    """
    if not sources:
        raise UserError("no model to inspect; name a folder, a GGUF file or a model on the Hub")
    twice = next((source for source in sources if sources.count(source) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; keep one")
    parts = [Path(source).expanduser().absolute().parts for source in sources]
    names = []
    for own in parts:
        depth = 1
        while depth < len(own) and sum(other[-depth:] == own[-depth:] for other in parts) > 1:
            depth += 1
        names.append("/".join(own[-depth:]).removesuffix(".gguf"))
    return names


def command_line(config: InspectConfig) -> str:
    """The command with what differs from the defaults."""
    words = ["geonorm", "inspect", *config.models]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("models", "overwrite") or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def _inspect_source(source: str, name: str, text: Text, config: InspectConfig) -> dict[str, Any]:
    model, tokenizer = load_model(source, dtype=config.dtype, device=config.device)
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    length = config.length or int(min(DEFAULT_LENGTH, limit))
    if length > limit:
        raise UserError(f"`length` {length} is more than the {limit} positions of {name}; give at most {limit}")
    windows = make_windows(
        text.text, tokenizer, num_windows=config.windows, length=length, special_tokens=config.special_tokens
    )
    found = inspect_model(model, windows.ids, skip_first=config.skip_first, gradients=config.gradients)
    return {
        "name": name,
        "source": str(source),
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **as_dict(found, windows),
    }


def as_dict(found: Inspection, windows: TokenWindows) -> dict[str, Any]:
    """An inspection as plain values. Angles are radians, lengths RMS."""
    return {
        "family": found.family,
        "placement": found.placement.name,
        "placement_options": found.placement.options(),
        "placement_label": found.placement.label(),
        "num_layers": found.num_layers,
        "width": found.width,
        "num_parameters": found.num_parameters,
        "tokens": {
            "windows": len(windows.ids),
            "lengths": sorted({len(window) for window in windows.ids}),
            "total": found.num_tokens,
            "counted": found.num_counted,
            "skip_first": found.skip_first,
            "added_by_tokenizer": list(windows.added),
        },
        "loss": found.loss,
        "sublayers": [
            {
                "layer": row.layer,
                "sublayer": row.sublayer,
                **{name: dataclasses.asdict(getattr(row, name)) for name in QUANTITIES},
                "first_radius": row.first_radius,
                "first_angle": row.first_angle,
                "angle_with_first": row.angle_with_first,
            }
            for row in found.sublayers
        ],
        "radius_end": dataclasses.asdict(found.radius_end),
        "gradient_norms": list(found.gradient_norms) if found.gradient_norms else None,
        "first_token_influence": found.first_token_influence,
        "laws": _law_dict(found.laws),
        "alpha_laws": _law_dict(found.alpha_laws),
    }


def _law_dict(laws: dict[str, tuple[LawFits, LawFits]]) -> dict[str, Any]:
    return {
        series: {"all": dataclasses.asdict(every), "inner": dataclasses.asdict(inner)}
        for series, (every, inner) in laws.items()
    }


def _environment(device: str) -> dict[str, str]:
    return {
        "geonorm": geonorm.__version__,
        "torch": torch.__version__,
        "step": which(torch.empty(1, 1, device=device)),
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
