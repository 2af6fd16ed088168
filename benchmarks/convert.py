"""A trained model converted to GeoNorm: the loss of each way to choose the step sizes, and 100 steps of training on.

    python -m benchmarks.convert calibrate MODEL --text FILE --out runs/convert
    python -m benchmarks.convert train MODEL --text FILE --out runs/convert --name stock
    python -m benchmarks.convert train runs/convert/converted --text FILE --out runs/convert --name converted
    python -m benchmarks.convert collect --out runs/convert --into docs/results/convert.json

MODEL is a stock Pre-Norm model in any form that geonorm loads; FILE is text. Calibration text and held-out text come
from different documents; both runs train on the same windows in the same order. Each command is deterministic.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from geonorm.conversion import convert_model
from geonorm.conversion.held_out import split_source, usable, windows_of_side
from geonorm.data.sources import FileSource
from geonorm.data.split import TRAIN, VAL
from geonorm.data.token_file import write_tokens
from geonorm.data.tokenizer import token_byte_lengths
from geonorm.data.windows import Windows
from geonorm.models import rewire
from geonorm.models.loading import load_model
from geonorm.storage import write_json
from geonorm.training import MetricsFile, RunConfig, evaluate, recipe, train
from geonorm.training.config import DataConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "projection, sequential": {"retraction": "projection", "method": "sequential"},
    "projection, stock activations": {"retraction": "projection", "method": "stock"},
    "exponential, sequential": {"retraction": "exponential", "method": "sequential"},
    "exponential, stock activations": {"retraction": "exponential", "method": "stock"},
    "exponential, sequential, max_angle pi/2": {"retraction": "exponential", "max_angle": math.pi / 2},
    "exponential, sequential, max_angle pi/4": {"retraction": "exponential", "max_angle": math.pi / 4},
}
CALIBRATION_WINDOWS, HELD_OUT_WINDOWS, LENGTH = 8, 16, 128
TRAIN_CHARACTERS_A_DOCUMENT = 6_000

Model = Annotated[str, tyro.conf.Positional]
Texts = tuple[Path, ...]


def calibrate(model: Model, text: Texts, out: Path) -> None:
    """Convert in every way, write the losses, and save the model with the lowest as OUT/converted."""
    out.mkdir(parents=True, exist_ok=True)
    stock, tokenizer = load_model(model, dtype="float32")
    source = FileSource(text)
    split = split_source(source)
    ids = windows_of_side(source, split, TRAIN, tokenizer, num_windows=CALIBRATION_WINDOWS, length=LENGTH)
    held = _held_out(source, split, tokenizer)
    result: dict[str, Any] = {
        "model": Path(model).name,
        "text": source.names,
        "calibration_tokens": ids.numel(),
        "held_out_tokens": HELD_OUT_WINDOWS * LENGTH,
        "stock_loss": evaluate(stock, held, _bytes(stock, tokenizer), batch=4, precision="fp32").loss,
        "variants": {},
    }
    best = float("inf")
    for name, options in VARIANTS.items():
        converted = copy.deepcopy(stock)
        found = convert_model(converted, ids, **options)
        loss = evaluate(converted, held, _bytes(stock, tokenizer), batch=4, precision="fp32").loss
        result["variants"][name] = {"options": options, "loss": loss, "fold_error": found.fold_error}
        result["variants"][name]["sublayers"] = [dataclasses.asdict(entry) for entry in found.sublayers]
        print(f"{name}: {result['stock_loss']:.4f} before, {loss:.4f} after", flush=True)
        if loss < best:
            best = loss
            converted.save_pretrained(out / "converted")
            tokenizer.save_pretrained(out / "converted")
        write_json(out / "calibration.json", result)


def train_on(model: Model, text: Texts, out: Path, name: str, steps: int = 100, lr: float = 3e-4) -> None:
    """Train a model on, stock or converted: each row to OUT/train-NAME.jsonl as it comes, a summary to the .json."""
    out.mkdir(parents=True, exist_ok=True)
    loaded, tokenizer = load_model(model, dtype="float32")
    if not hasattr(loaded.config, "placement"):
        rewire(loaded, "pre")
    source = FileSource(text)
    split = split_source(source)
    held = _held_out(source, split, tokenizer)
    settings = RunConfig(
        data=DataConfig(seq_len=LENGTH),
        optimizer=OptimizerConfig(lr=lr),
        schedule=ScheduleConfig(warmup=min(10, steps - 1)),
        evaluation=EvaluationConfig(log_every=1, every=50, windows=HELD_OUT_WINDOWS, layers_every=steps),
        steps=steps,
        global_batch_size=2,
        precision="bf16",
    )
    num_bytes = _bytes(loaded, tokenizer)
    before = evaluate(loaded, held, num_bytes, batch=4, precision="fp32")
    rows: list[dict[str, Any]] = []
    metrics = MetricsFile(out / f"train-{name}.jsonl")

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        metrics.write(row)
        if row["kind"] in ("train", "eval"):
            print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.tokens")
        file = write_tokens(_some(source, split), tokenizer.backend_tokenizer, path, eos=tokenizer.eos_token)
        outcome = train(loaded, Windows(file, LENGTH, settings.seed), held, num_bytes, settings, emit)
        tokens = file.num_tokens
    after = evaluate(loaded, held, num_bytes, batch=4, precision="fp32")
    result = {
        "model": Path(model).name,
        "placement": loaded.config.placement,
        "settings": recipe.resolved(settings),
        "tokens_on_hand": tokens,
        "loss_before": before.loss,
        "bits_per_byte_before": before.bits_per_byte,
        "loss_after": after.loss,
        "bits_per_byte_after": after.bits_per_byte,
        "status": outcome.status,
        "skipped": outcome.skipped,
        **_curves(rows),
        "angles": [row["angle"] for row in rows if row["kind"] == "layers"],
    }
    metrics.close()
    write_json(out / f"train-{name}.json", result)


def collect(out: Path, into: Path) -> None:
    """Put the results of all commands into one file; of a run that has not ended, the steps that it has made."""
    parts = {"calibration": json.loads((out / "calibration.json").read_text())}
    for path in sorted(out.glob("train-*.jsonl")):
        summary = path.with_suffix(".json")
        if summary.is_file():
            parts[path.stem] = json.loads(summary.read_text())
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            parts[path.stem] = {"status": "unfinished", **_curves(rows)}
    write_json(into, parts)


def _curves(rows: list[dict[str, Any]]) -> dict[str, list]:
    return {
        "train": [[row["step"], row["loss"]] for row in rows if row["kind"] == "train"],
        "eval": [[row["step"], row["val_loss"]] for row in rows if row["kind"] == "eval"],
    }


def _held_out(source: FileSource, split: Any, tokenizer: Any) -> Any:
    windows = windows_of_side(source, split, VAL, tokenizer, num_windows=HELD_OUT_WINDOWS, length=LENGTH + 1)
    return windows.numpy()


def _bytes(model: Any, tokenizer: Any) -> Any:
    lengths = token_byte_lengths(tokenizer.backend_tokenizer)
    return lengths[: model.config.vocab_size]


def _some(source: FileSource, split: Any) -> Any:
    """The beginning of every document of the training side."""
    for text in usable(source):
        for side, part in split.parts(text):
            if side == TRAIN:
                yield part[:TRAIN_CHARACTERS_A_DOCUMENT]


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.extras.subcommand_cli_from_dict({"calibrate": calibrate, "train": train_on, "collect": collect})
