"""``geonorm inspect``: load models, measure each on the same text, and keep the numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from geonorm.errors import UserError, check_count, check_folder_path
from geonorm.inspection.laws import LawFits
from geonorm.inspection.measure import Inspection, inspect_model
from geonorm.inspection.sample_text import Text, TokenWindows, make_windows, read_text
from geonorm.model_options import InspectConfig
from geonorm.models.loading import load_model
from geonorm.models.source import check_source
from geonorm.models.tokens import check_length
from geonorm.progress_bar import ProgressBar
from geonorm.provenance import command_line, environment
from geonorm.ranges import check_ranges
from geonorm.storage import read_json, write_json

RESULTS = "inspection.json"
FORMAT = 1
DEFAULT_LENGTH = 512


def inspect_models(config: InspectConfig, console: Console) -> dict[str, Any]:
    """Inspect every model and write ``inspection.json``.

    Returns:
        What the file holds; ``docs/unification.md`` describes it.

    Raises:
        UserError: an option out of range, a folder that holds something already, a model or text that cannot be read.
            Everything that can be checked without a model is checked before the first one is loaded.
    """
    check_ranges(config)
    if config.length is not None:
        check_count("length", config.length, config.skip_first + 2)
    check_folder(config.out, config.overwrite)
    names = model_names(config.models)
    for source in config.models:
        check_source(source)
    text = read_text(config.text, config.text_column)
    with ProgressBar(console) as bar:
        for note in text.notes:
            bar.say(note)
        models = [_inspect(*pair, text, config, bar) for pair in zip(config.models, names, strict=True)]
    results = {
        "format": FORMAT,
        "text": {"name": text.name, "characters": len(text.text), "cut": text.cut, "sha256": text.digest},
        "settings": {
            name: getattr(config, name) for name in ("windows", "length", "skip_first", "special_tokens", "gradients")
        },
        "models": models,
        "command": command_line("inspect", config, positional=["models"], without=["overwrite"]),
        "environment": environment(config.device),
    }
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
    found = read_json(out / RESULTS)
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


def _inspect(source: str, name: str, text: Text, config: InspectConfig, bar: ProgressBar) -> dict[str, Any]:
    what = f"inspecting {name}"
    if not bar.console.is_terminal:
        bar.say(what)
    bar.begin(what)
    model, tokenizer = load_model(source, dtype=config.dtype, device=config.device)
    length = check_length(model, config.length, DEFAULT_LENGTH, name)
    windows = make_windows(
        text.text, tokenizer, num_windows=config.windows, length=length, special_tokens=config.special_tokens
    )
    bar.begin(what, len(windows.ids), "windows")
    found = inspect_model(
        model, windows.ids, skip_first=config.skip_first, gradients=config.gradients, advance=bar.advance
    )
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
        "sublayers": [dataclasses.asdict(row) for row in found.sublayers],
        "radius_end": dataclasses.asdict(found.radius_end),
        "gradient_norms": list(found.gradient_norms) if found.gradient_norms else None,
        "first_token_influence": found.first_token_influence,
        "laws": _law_dict(found.laws),
        "alpha_laws": _law_dict(found.alpha_laws),
    }


def _law_dict(laws: dict[str, tuple[LawFits, LawFits]]) -> dict[str, Any]:
    names = ("all", "inner")
    return {series: dict(zip(names, map(dataclasses.asdict, fits), strict=True)) for series, fits in laws.items()}
