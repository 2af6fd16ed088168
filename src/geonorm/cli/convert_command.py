"""``geonorm convert``: load, convert, measure before and after, save."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from geonorm import signals
from geonorm.cli.option_types import Dtype, Model, arg
from geonorm.errors import UserError, check_folder_path, unknown
from geonorm.ranges import POSITIVE, Count
from geonorm.storage import finite

_EVAL_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Convert:
    """Turn a trained Pre-Norm model into a GeoNorm model to train on from."""

    model: Model
    """A folder, a GGUF file or a Hub name: a stock decoder with RMSNorm before its sub-layers"""
    out: Path
    """Folder for the converted model; it must not exist, or be empty"""
    to: str = "geonorm"
    """Placement: geonorm, or pre, which changes nothing but the class"""
    text: Annotated[tuple[Path, ...], arg("PATH [PATH ...]", "the standard-library corpus")] = ()
    """Text, jsonl or parquet files, or folders of them, to calibrate on and to measure the loss with"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    method: str = "sequential"
    """Where step sizes are taken from: sequential (the converted model so far) or stock (the model as it was)"""
    retraction: str = "projection"
    """projection (Pre-Norm's own law at one length of the stream), exponential, cayley or a number p"""
    max_angle: Annotated[float | None, POSITIVE, arg("RADIANS", "no limit")] = None
    """Limit of one step's angle; trained models' first layers move far, so there is none by default"""
    learnable: bool = False
    """Make the step sizes trainable"""
    windows: Annotated[int, Count()] = 16
    """Windows to calibrate on, run at once"""
    eval_windows: Annotated[int, Count()] = 32
    """Windows held out, from other documents, to measure the loss on before and after"""
    length: Annotated[int, Count(2)] = 256
    """Tokens a window"""
    dtype: Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""

    def run(self) -> int:
        """Convert a model and save it with its tokenizer, a record of the conversion and a README.

        The record holds ``model``, ``to``, ``step`` (implementation), ``settings``, ``loss_before`` and ``loss_after``
        (nats a token on held-out text), ``sublayers`` (angle, across and alpha of each), ``fold_error``.

        Raises:
            UserError: a target that a trained model cannot be converted to, a folder that holds something, or what
                loading and converting raise.
        """
        _check(self)
        import torch
        from rich.console import Console

        from geonorm.conversion.convert import check_convertible
        from geonorm.conversion.converted_folder import save_converted
        from geonorm.data.sources import FileSource
        from geonorm.data.standard_library import StandardLibrarySource
        from geonorm.models import rewire
        from geonorm.models.loading import load_model
        from geonorm.ops import which
        from geonorm.progress_bar import ProgressBar

        signals.begin()
        source = FileSource(self.text, self.text_column) if self.text else StandardLibrarySource()
        with ProgressBar(Console()) as bar:
            bar.begin(f"loading {self.model}")
            model, tokenizer = load_model(self.model, dtype=self.dtype, device=self.device)
            check_convertible(model)
            record: dict[str, Any] = {
                "model": self.model,
                "to": self.to,
                "step": which(torch.empty(1, 1, device=model.device)),
                "settings": finite(dataclasses.asdict(self)),
            }
            if self.to == "pre":
                rewire(model, "pre")
                bar.say(
                    "a stock Pre-Norm model already has placement 'pre': saved with the class changed and no bit of "
                    "its weights"
                )
            else:
                record |= _convert(self, model, tokenizer, source, bar)
                bar.say(
                    f"loss on held-out text: {record['loss_before']:.4f} before, {record['loss_after']:.4f} after, "
                    f"{record['chance']:.4f} by guessing (nats a token)"
                )
            save_converted(model, tokenizer, self.out, record)
            bar.say(f"saved: {self.out}")
        return 0


def _check(options: Convert) -> None:
    from geonorm.conversion.calibrate import METHODS
    from geonorm.placements import available, create

    create(options.to)
    if options.to not in ("geonorm", "pre"):
        raise UserError(
            f"a trained model cannot be converted to {options.to!r}: its norms would have no trained gains and its "
            f"updates another size; --to takes geonorm or pre, geonorm.models.rewire any of {', '.join(available())}"
        )
    if options.method not in METHODS:
        raise unknown("calibration method", options.method, METHODS)
    create("geonorm", retraction=_retraction(options), max_angle=options.max_angle)
    check_folder_path("out", options.out)
    if options.out.exists() and any(options.out.iterdir()):
        raise UserError(f"`out` {options.out} exists and is not empty; give a new folder")


def _retraction(options: Convert) -> str | float:
    try:
        return float(options.retraction)
    except ValueError:
        return options.retraction


def _convert(options: Convert, model: Any, tokenizer: Any, source: Any, bar: Any) -> dict[str, Any]:
    from geonorm.conversion.convert import convert_model
    from geonorm.conversion.held_out import split_source, windows_of_side
    from geonorm.data.split import TRAIN, VAL
    from geonorm.models.tokens import check_ids, check_length

    check_length(model, options.length, options.length, options.model)
    bar.begin("reading text")
    split = split_source(source)
    text = {"source": source, "split": split, "tokenizer": tokenizer, "length": options.length + 1}
    held = windows_of_side(**text, side=VAL, num_windows=options.eval_windows)
    ids = windows_of_side(**text, side=TRAIN, num_windows=options.windows)[:, :-1]
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
        method=options.method,
        retraction=_retraction(options),
        max_angle=options.max_angle,
        learnable=options.learnable,
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


def _loss(model: Any, windows: Any, advance: Callable[[float], None]) -> float:
    """Mean nats a token of windows ``[n, length + 1]``, summed in float64."""
    import numpy as np

    from geonorm.training.validation import token_losses, undisturbed

    losses = []
    with undisturbed(model):
        for some in windows.split(_EVAL_BATCH):
            losses.append(token_losses(model, some.to(model.device)).cpu().numpy())
            advance(len(some))
    return float(np.concatenate(losses).astype(np.float64).mean())
