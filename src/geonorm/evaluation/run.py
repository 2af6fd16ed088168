"""``geonorm eval`` and ``geonorm generate`` from their options."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from geonorm.data.sources import FileSource
from geonorm.errors import UserError, check_count, check_unicode
from geonorm.evaluation.config import EvalConfig, GenerateConfig
from geonorm.evaluation.generation import GenerationSettings, generate
from geonorm.evaluation.tasks import check_settings, evaluate_tasks
from geonorm.evaluation.text import check_window, perplexity
from geonorm.models.load import load_model
from geonorm.ops import which
from geonorm.storage import write_json


def run_eval(config: EvalConfig, console: Console) -> dict[str, Any]:
    """Evaluate a model, print tables, write the JSON file if one is asked for.

    Returns:
        What the file holds: ``model``, ``placement`` (None for a stock model), ``step`` (implementation), ``settings``,
        ``text`` (fields of :class:`Perplexity`, or None) and ``tasks`` (rows of :func:`evaluate_tasks`).
    """
    if not config.tasks and not config.text:
        raise UserError("nothing to evaluate; name tasks with --tasks or files with --text")
    if config.out is not None:
        check_unicode("out", config.out.absolute())
    if config.out is not None and (config.out.is_dir() or not config.out.absolute().parent.is_dir()):
        raise UserError(f"`out` {config.out} must be a file in a folder that exists")
    if config.out is not None and config.out.exists() and not _is_results(config.out):
        raise UserError(f"`out` {config.out} is there and no result of geonorm eval; name another file")
    check_count("batch", config.batch)
    if config.max_documents is not None:
        check_count("max_documents", config.max_documents)
    if config.tasks:
        check_settings(config.tasks, config.limit, config.num_fewshot, config.batch, config.include_path)
    # Before the model is loaded: what is wrong with the files shows at once.
    source = FileSource(config.text, config.text_column) if config.text else None
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    placement = getattr(model.config, "placement", None)
    results: dict[str, Any] = {
        "model": config.model,
        "class": type(model).__name__,
        "placement": placement,
        "placement_options": getattr(model.config, "placement_options", None),
        "step": which(torch.empty(1, 1, device=model.device)),
        "settings": {key: _plain(value) for key, value in dataclasses.asdict(config).items()},
        "text": None,
        "tasks": [],
    }
    if source is not None:
        length, stride = check_window(model, config.length, config.stride)
        documents = _documents(source, config.max_documents)
        found = perplexity(model, tokenizer, documents, length=length, stride=stride, batch=config.batch)
        results["text"] = dataclasses.asdict(found)
        for note in source.notes():
            console.print(note, markup=False, highlight=False, soft_wrap=True)
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


def run_generate(config: GenerateConfig) -> None:
    """Write on after the prompts of the options, or after standard input."""
    settings = GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        num_beams=config.beams,
        seed=config.seed,
        chat=config.chat,
        parse_special=config.parse_special,
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


def _is_results(path: Path) -> bool:
    """Whether a file was written by this command, so that it may be replaced."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"model", "placement", "settings", "text", "tasks"} <= set(found)


def _documents(source: FileSource, limit: int | None) -> Iterator[str]:
    documents = source.documents(Counter())
    return documents if limit is None else itertools.islice(documents, limit)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


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
