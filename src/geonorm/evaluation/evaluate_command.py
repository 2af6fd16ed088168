"""``geonorm eval`` and ``geonorm generate`` from their options."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from geonorm.data.sources import FileSource
from geonorm.errors import UserError, check_unicode
from geonorm.evaluation.generation import GenerationSettings, generate
from geonorm.evaluation.score_text import check_window, perplexity
from geonorm.evaluation.tasks import check_settings, evaluate_tasks
from geonorm.model_options import EvalConfig, GenerateConfig
from geonorm.models.loading import load_model
from geonorm.ops import which
from geonorm.progress_bar import ProgressBar
from geonorm.ranges import check_ranges
from geonorm.storage import finite, read_json, write_json


def evaluate_model(config: EvalConfig, console: Console) -> dict[str, Any]:
    """Evaluate a model, print tables, write the JSON file if one is asked for.

    Returns:
        What the file holds: ``model``, ``placement`` (None for a stock model), ``step`` (implementation), ``settings``,
        ``text`` (fields of :class:`Perplexity`, or None) and ``tasks`` (rows of :func:`evaluate_tasks`).

    Raises:
        UserError: nothing to evaluate, an option out of range, an ``out`` that is no file to write to, or what loading,
            :func:`perplexity` and :func:`evaluate_tasks` raise.
    """
    _check(config)
    # Before the model is loaded: what is wrong with the files shows at once.
    source = FileSource(config.text, config.text_column) if config.text else None
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    results: dict[str, Any] = {
        "model": config.model,
        "class": type(model).__name__,
        "placement": getattr(model.config, "placement", None),
        "placement_options": getattr(model.config, "placement_options", None),
        "step": which(torch.empty(1, 1, device=model.device)),
        "settings": finite(dataclasses.asdict(config)),
        "text": None,
        "tasks": [],
    }
    if source is not None:
        results["text"] = _score(config, model, tokenizer, source, console)
        console.print(_text_table(config.model, results["text"]))
        if config.out is not None and config.tasks:
            # Tasks may fail for want of their data, which must not cost what is done.
            write_json(config.out, results)
    if config.tasks:
        results["tasks"] = evaluate_tasks(
            model,
            tokenizer,
            config.tasks,
            include_path=config.include_path,
            limit=config.limit,
            num_fewshot=config.num_fewshot,
            batch=config.batch,
        )
        console.print(_task_table(config.model, results["tasks"]))
    if config.out is not None:
        write_json(config.out, results)
        console.print(f"results: {config.out}", markup=False, highlight=False, soft_wrap=True)
    return results


def _check(config: EvalConfig) -> None:
    if not config.tasks and not config.text:
        raise UserError("nothing to evaluate; name tasks with --tasks or files with --text")
    out = config.out
    if out is not None:
        check_unicode("out", out.absolute())
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise UserError(f"`out` {out} must be a file in a folder that exists")
        if out.exists():
            found = read_json(out)
            if not isinstance(found, dict) or not {"model", "placement", "settings", "text", "tasks"} <= set(found):
                raise UserError(f"`out` {out} is there and no result of geonorm eval; name another file")
    check_ranges(config)
    if config.tasks:
        check_settings(config.tasks, config.limit, config.num_fewshot, config.batch, config.include_path)


def _score(config: EvalConfig, model: Any, tokenizer: Any, source: FileSource, console: Console) -> dict[str, Any]:
    length, stride = check_window(model, config.length, config.stride)

    def documents() -> Any:
        return itertools.islice(source.documents(Counter()), config.max_documents)

    # Reading twice takes little beside scoring, but is of use only to whom the time left is shown.
    total = sum(len(text.encode()) for text in documents()) / 1e3 if console.is_terminal else None
    with ProgressBar(console) as bar:
        bar.begin("scoring text", total, "kB")
        found = perplexity(
            model,
            tokenizer,
            documents(),
            length=length,
            stride=stride,
            batch=config.batch,
            advance=lambda num_bytes: bar.advance(num_bytes / 1e3),
        )
        for note in source.notes():
            bar.say(note)
    return dataclasses.asdict(found)


def continue_prompts(config: GenerateConfig) -> None:
    """Write on after the prompts of the options, or after standard input.

    Raises:
        UserError: no prompt, one that is not UTF-8, or what loading and :func:`generate` raise.
    """
    settings = GenerationSettings(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(GenerationSettings)}
    )
    if not config.prompt and sys.stdin.isatty():
        raise UserError("no prompt given; use --prompt TEXT, or send text to standard input")
    for prompt in config.prompt:
        check_unicode("prompt", prompt)
    prompts = [_standard_input() if prompt == "-" else prompt for prompt in config.prompt or ("-",)]
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    generate(model, tokenizer, prompts, settings)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x}; convert it to UTF-8"
        ) from None


def _text_table(model: str, found: dict[str, Any]) -> Table:
    table = Table(title=f"{model} on text", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("bits per byte", f"{found['bits_per_byte']:.4f}")
    table.add_row("nats per token", f"{found['loss']:.4f}")
    table.add_row("perplexity", f"{found['perplexity']:.4g}")
    for name in ("documents", "tokens", "bytes"):
        table.add_row(name, f"{found[f'num_{name}']:,}")
    table.add_row("window, stride", f"{found['length']}, {found['stride']}")
    if found["num_unknown"]:
        table.caption = f"{found['num_unknown']:,} tokens are unknown to the tokenizer, so bits/byte is too low"
    return table


def _task_table(model: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{model} on tasks", title_justify="left")
    for name in ("task", "metric", "filter", "shots", "examples"):
        table.add_column(name)
    for name in ("value", "stderr"):
        table.add_column(name, justify="right")
    for row in rows:
        value = f"{row['value']:.4f}" if isinstance(row["value"], (int, float)) else str(row["value"])
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        about = [row["task"], row["metric"], row["filter"], row["num_fewshot"], row["num_examples"]]
        table.add_row(*("" if item is None else str(item) for item in about), value, stderr)
    return table
