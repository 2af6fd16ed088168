"""``geonorm inspect``: load models, measure each on the same text, keep the numbers and report."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from geonorm import signals
from geonorm.cli.option_types import Dtype, arg
from geonorm.errors import UserError, check_count, check_folder_path
from geonorm.ranges import Count
from geonorm.storage import read_json, write_json

RESULTS = "inspection.json"
FORMAT = 1
DEFAULT_LENGTH = 512
Models = Annotated[tuple[str, ...], tyro.conf.Positional, arg("MODEL [MODEL ...]")]


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Run text through trained models and show what every sub-layer does to the residual stream."""

    models: Models
    """Folders, GGUF files or Hub names"""
    text: Annotated[tuple[Path, ...], arg("PATH [PATH ...]", "documentation of Python's standard library")] = ()
    """Text, jsonl or parquet files, or folders of them, to run through the models"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    windows: Annotated[int, Count()] = 4
    """Windows of text, from evenly spaced places"""
    length: Annotated[int | None, Count(), arg("INT", "512, or the model's own limit if lower")] = None
    """Tokens a window"""
    special_tokens: bool = True
    """Start each window with what the tokenizer puts there by itself, such as a BOS token"""
    skip_first: Annotated[int, Count(0)] = 1
    """Tokens left out of the statistics at the start of each window; their influence is reported"""
    gradients: bool = False
    """Also measure the gradient norm of each block (a backward pass: about three times the time, twice the memory)"""
    dtype: Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the models run, such as cuda"""
    out: Path = Path("runs/inspect")
    """Folder for the report, the figures and the numbers"""
    overwrite: bool = False
    """Replace an inspection that is there"""

    def run(self) -> int:
        """Inspect every model and write ``inspection.json``, which ``docs/unification.md`` describes, and the page.

        Raises:
            UserError: an option out of range, a folder that holds something already, a model or text that cannot be
                read. Everything that can be checked without a model is checked before the first one is loaded.
        """
        from rich.console import Console

        from geonorm.inspection.sample_text import read_text
        from geonorm.models.source import check_source
        from geonorm.progress_bar import ProgressBar
        from geonorm.provenance import command_line, environment
        from geonorm.report.inspection_page import write_inspection
        from geonorm.report.inspection_tables import print_inspection
        from geonorm.report.tables import say

        signals.begin()
        console = Console()
        if self.length is not None:
            check_count("length", self.length, self.skip_first + 2)
        _check_folder(self.out, self.overwrite)
        names = _model_names(self.models)
        for source in self.models:
            check_source(source)
        text = read_text(self.text, self.text_column)
        with ProgressBar(console) as bar:
            for note in text.notes:
                bar.say(note)
            models = [_inspect(*pair, text, self, bar) for pair in zip(self.models, names, strict=True)]
        results = {
            "format": FORMAT,
            "text": {"name": text.name, "characters": len(text.text), "cut": text.cut, "sha256": text.digest},
            "settings": {
                name: getattr(self, name) for name in ("windows", "length", "skip_first", "special_tokens", "gradients")
            },
            "models": models,
            "command": command_line("inspect", self, positional=["models"], without=["overwrite"]),
            "environment": environment(self.device),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / RESULTS, results)
        page = write_inspection(self.out, results)
        print_inspection(results, console)
        say(console, f"numbers: {self.out / RESULTS}")
        say(console, f"report: {page}")
        return 0


def _check_folder(out: Path, overwrite: bool) -> None:
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


def _model_names(sources: tuple[str, ...]) -> list[str]:
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


def _inspect(source: str, name: str, text: Any, options: Inspect, bar: Any) -> dict[str, Any]:
    from geonorm.inspection.measure import inspect_model
    from geonorm.inspection.sample_text import make_windows
    from geonorm.models.loading import load_model
    from geonorm.models.tokens import check_length

    what = f"inspecting {name}"
    if not bar.console.is_terminal:
        bar.say(what)
    bar.begin(what)
    model, tokenizer = load_model(source, dtype=options.dtype, device=options.device)
    length = check_length(model, options.length, DEFAULT_LENGTH, name)
    windows = make_windows(
        text.text, tokenizer, num_windows=options.windows, length=length, special_tokens=options.special_tokens
    )
    bar.begin(what, len(windows.ids), "windows")
    found = inspect_model(
        model, windows.ids, skip_first=options.skip_first, gradients=options.gradients, advance=bar.advance
    )
    return {
        "name": name,
        "source": str(source),
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **_as_dict(found, windows),
    }


def _as_dict(found: Any, windows: Any) -> dict[str, Any]:
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


def _law_dict(laws: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    names = ("all", "inner")
    return {series: dict(zip(names, map(dataclasses.asdict, fits), strict=True)) for series, fits in laws.items()}
