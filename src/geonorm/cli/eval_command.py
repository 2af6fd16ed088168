"""``geonorm eval``."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from geonorm import signals
from geonorm.cli.option_types import Dtype, Model, Paths, arg
from geonorm.console import results_are_printed
from geonorm.errors import UserError, check_unicode
from geonorm.ranges import POSITIVE, Count
from geonorm.storage import finite, read_json, write_json


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a model, stock or rewired: tasks of lm-eval, perplexity and bits per byte on text."""

    model: Model
    """A folder, a GGUF file or a Hub name"""
    tasks: Annotated[tuple[str, ...], arg("NAME [NAME ...]")] = ()
    """Tasks of lm-eval: names, patterns, or YAML files"""
    include_path: Paths = ()
    """Folders with task files of your own; Python that they name is run"""
    limit: Annotated[float | None, POSITIVE, arg("NUMBER", "all")] = None
    """Examples of each task, or a share of them below 1"""
    num_fewshot: Annotated[int | None, Count(0), arg("INT", "what the task says")] = None
    """Solved examples before each question"""
    text: Paths = ()
    """Text, jsonl or parquet files, or folders of them, to score token by token"""
    text_column: str = "text"
    """Column of jsonl and parquet files that holds the text"""
    max_documents: Annotated[int | None, Count(), arg("INT", "all")] = None
    """Read only the first so many documents"""
    length: Annotated[int | None, Count(), arg("INT", "1024, or the model's limit")] = None
    """Most tokens that a window over the text reads"""
    stride: Annotated[int | None, Count(), arg("INT", "half of --length")] = None
    """Tokens that the window moves by: smaller gives every token more context and takes longer"""
    batch: Annotated[int, Count()] = 4
    """Windows or requests at a time; changes speed and memory alone"""
    dtype: Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""
    out: Annotated[Path | None, arg("FILE", "none")] = None
    """JSON file for the results"""

    def run(self) -> int:
        """Evaluate, print tables, and write the JSON file if one is asked for.

        That holds ``model``, ``placement`` (None for a stock model), ``step`` (implementation), ``settings``, ``text``
        (fields of :class:`Perplexity`, or None) and ``tasks`` (rows of :func:`evaluate_tasks`).

        Raises:
            UserError: nothing to evaluate, an ``out`` that is no file to write to, or what loading,
                :func:`perplexity` and :func:`evaluate_tasks` raise.
        """
        import torch
        from rich.console import Console

        from geonorm.data.sources import FileSource
        from geonorm.evaluation.tasks import evaluate_tasks
        from geonorm.models.loading import load_model
        from geonorm.ops import which

        signals.begin()
        if self.out is None:
            results_are_printed()
        console = Console()
        _check(self)
        # Before the model is loaded: what is wrong with the files shows at once.
        source = FileSource(self.text, self.text_column) if self.text else None
        model, tokenizer = load_model(self.model, dtype=self.dtype, device=self.device)
        results: dict[str, Any] = {
            "model": self.model,
            "class": type(model).__name__,
            "placement": getattr(model.config, "placement", None),
            "placement_options": getattr(model.config, "placement_options", None),
            "step": which(torch.empty(1, 1, device=model.device)),
            "settings": finite(dataclasses.asdict(self)),
            "text": None,
            "tasks": [],
        }
        if source is not None:
            results["text"] = _score(self, model, tokenizer, source, console)
            console.print(_text_table(self.model, results["text"]))
            if self.out is not None and self.tasks:
                # Tasks may fail for want of their data, which must not cost what is done.
                write_json(self.out, results)
        if self.tasks:
            results["tasks"] = evaluate_tasks(
                model,
                tokenizer,
                self.tasks,
                include_path=self.include_path,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                batch=self.batch,
            )
            console.print(_task_table(self.model, results["tasks"]))
        if self.out is not None:
            write_json(self.out, results)
            console.print(f"results: {self.out}", markup=False, highlight=False, soft_wrap=True)
        return 0


def _check(options: Eval) -> None:
    if not options.tasks and not options.text:
        raise UserError("nothing to evaluate; name tasks with --tasks or files with --text")
    out = options.out
    if out is not None:
        check_unicode("out", out.absolute())
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise UserError(f"`out` {out} must be a file in a folder that exists")
        if out.exists():
            found = read_json(out)
            if not isinstance(found, dict) or not {"model", "placement", "settings", "text", "tasks"} <= set(found):
                raise UserError(f"`out` {out} is there and no result of geonorm eval; name another file")
    if options.tasks:
        from geonorm.evaluation.tasks import check_settings

        check_settings(options.tasks, options.limit, options.num_fewshot, options.batch, options.include_path)


def _score(options: Eval, model: Any, tokenizer: Any, source: Any, console: Any) -> dict[str, Any]:
    from geonorm.evaluation.score_text import check_window, perplexity
    from geonorm.progress_bar import ProgressBar

    length, stride = check_window(model, options.length, options.stride)

    def documents() -> Any:
        return itertools.islice(source.documents(Counter()), options.max_documents)

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
            batch=options.batch,
            advance=lambda num_bytes: bar.advance(num_bytes / 1e3),
        )
        for note in source.notes():
            bar.say(note)
    return dataclasses.asdict(found)


def _text_table(model: str, found: dict[str, Any]) -> Any:
    from rich.table import Table

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


def _task_table(model: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

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
