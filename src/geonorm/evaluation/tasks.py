"""Tasks of lm-eval on a model of ours."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geonorm.errors import UserError, check_count, first_line
from geonorm.models.tokens import check_ids, padding_id

# Stock default is 100,000 resamplings for metrics without a closed form; three digits of an error bar need fewer.
_RESAMPLINGS = 1000


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: Sequence[Path] = (),
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch: int = 4,
) -> list[dict[str, Any]]:
    """Run tasks of lm-eval (the package `lm_eval`) on a model that is loaded already.

    Task files in ``include_path`` may name Python functions beside them (``!function``), which lm-eval runs: include
    only folders that you trust.

    Text is encoded as lm-eval does it, so that results compare with what others publish: there the spelling of a
    special token in a question is that token, unlike everywhere else in geonorm.

    Args:
        model: a decoder with a language-model head, stock or rewired.
        tokenizer: its tokenizer.
        tasks: names, patterns such as ``mmlu_*``, or YAML files.
        include_path: folders with task files of your own; a relative ``data_files`` in them starts at the current
            folder.
        limit: examples of each task, or, below 1, their share; None for all.
        num_fewshot: solved examples before each question; None for what the task says.
        batch: requests at a time.

    Returns:
        One row a task and metric: ``task``, ``version``, ``filter``, ``num_fewshot``, ``num_examples``, ``metric``,
        ``value``, ``stderr`` (None where there is none) and ``higher_is_better``.

    Raises:
        UserError: lm-eval is missing, an unknown task, data that cannot be read (most stock tasks fetch theirs), a
            setting out of range, or a question with a token that the model has no embedding for.
    """
    check_settings(tasks, limit, num_fewshot, batch, include_path)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval
    from lm_eval.models import huggingface

    # Decorators and arguments that its annotations do not tell apart.
    run: Any = lm_eval.simple_evaluate
    wrapper: Any = huggingface.HFLM

    class Checked(wrapper):
        def tok_encode(self, *args: Any, **kwargs: Any) -> list[int]:
            found = super().tok_encode(*args, **kwargs)
            check_ids(model, found, "a question of the tasks")
            return found

    pad = padding_id(model, tokenizer)
    if pad != tokenizer.pad_token_id:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token_id = pad
    manager, loaded = _load(tasks, include_path)
    # Loading is done; doing it twice would read all data twice.
    manager.load = lambda *args, **options: loaded
    results = run(
        model=Checked(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch),
        tasks=list(tasks),
        task_manager=manager,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        num_fewshot=num_fewshot,
        bootstrap_iters=_RESAMPLINGS,
        log_samples=False,
    )
    assert results is not None, "only a rank other than 0 gets no results"
    return _rows(dict(results))


def check_settings(
    tasks: Sequence[str], limit: float | None, num_fewshot: int | None, batch: int, include_path: Sequence[Path]
) -> None:
    """Check what :func:`evaluate_tasks` is asked for, as far as no task has to be loaded.

    Raises:
        UserError: no task, a setting out of range, a folder that is not there, or lm-eval missing.
    """
    if not tasks:
        raise UserError("no task given; name at least one")
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise UserError(f"`limit` must be a number of examples, or a share of them below 1, got {limit}")
    if num_fewshot is not None:
        check_count("num_fewshot", num_fewshot, 0)
    check_count("batch", batch)
    for path in include_path:
        if not Path(path).is_dir():
            raise UserError(f"`include_path`: no such folder: {path}")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("running tasks needs the package lm-eval; run pip install 'geonorm[eval]'")


def _load(tasks: Sequence[str], include_path: Sequence[Path]) -> tuple[Any, Any]:
    from lm_eval.tasks import TaskManager

    own: list[str | Path] = [*include_path]
    if own:
        # Looking through the thousands of stock task files takes seconds, and own tasks seldom need them.
        manager = TaskManager(include_path=own, include_defaults=False)
        if all(task in manager.all_tasks for task in tasks):
            with contextlib.suppress(Exception):
                return manager, manager.load(list(tasks))
    manager = TaskManager(include_path=own or None)
    for task in tasks:
        _check_known(task, manager.all_tasks)
    try:
        return manager, manager.load(list(tasks))
    except Exception as error:
        raise UserError(
            f"the tasks {', '.join(tasks)} cannot be loaded ({first_line(error, with_class=True)}); their data "
            "must be in the local cache or on the network, and task files must be valid"
        ) from error


def _check_known(task: str, known: Sequence[str]) -> None:
    if task in known or any(fnmatch.fnmatchcase(name, task) for name in known):
        return
    if task.endswith((".yaml", ".yml")) and Path(task).is_file():
        return
    near = difflib.get_close_matches(task, known, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UserError(
        f"unknown task {task!r}{hint} (lm-eval knows {len(known)} tasks; `lm-eval ls tasks` lists its own, and "
        "--include-path adds a folder of yours)"
    )


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, found in results["results"].items():
        higher = results.get("higher_is_better", {}).get(task, {})
        for key, value in found.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = found.get(f"{metric}_stderr,{kept}")
            rows.append(
                {
                    "task": task,
                    "version": results.get("versions", {}).get(task),
                    "filter": kept,
                    "num_fewshot": results.get("n-shot", {}).get(task),
                    "num_examples": results.get("n-samples", {}).get(task, {}).get("effective"),
                    "metric": metric,
                    "value": value,
                    "stderr": stderr if isinstance(stderr, float) else None,
                    "higher_is_better": higher.get(metric),
                }
            )
    return rows
