"""``geonorm compare``: prepare the text, run the trials, summarise, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from geonorm.data import Corpus, Windows, prepare
from geonorm.errors import UserError
from geonorm.experiments.config import CompareConfig
from geonorm.experiments.display import Display
from geonorm.experiments.environment import environment
from geonorm.experiments.local import LocalExecutor
from geonorm.experiments.plan import CorpusKey, Plan, make_plan
from geonorm.experiments.statistics import summarize
from geonorm.experiments.trials import write_json

CONFIG = "config.yaml"
RESULTS = "results.json"
TRIALS = "trials"
_NAMES_SHOWN = 6


def compare(config: CompareConfig, console: Console) -> dict[str, Any]:
    """Run a comparison and write ``results.json`` to ``config.out``; returns its content.

    Raises:
        UserError: the options do not fit together, the data cannot be read, or ``config.out`` holds something else.
    """
    plan = make_plan(config)
    _check_folder(config.out, config.resume)
    corpus = prepare(
        list(config.data) or None,
        vocab_size=plan.vocab_size,
        report=lambda text: console.print(text, style="dim", markup=False, highlight=False),
    )
    resolved = {**plan.resolved(), "corpus_fingerprint": corpus.description["fingerprint"]}
    _check_windows(plan, corpus)
    _claim_folder(config.out, resolved)
    results = _run(plan, corpus, console)
    output = {
        "trials": results,
        "summary": summarize(results, config.out / TRIALS),
        "environment": environment(),
        "settings": plan.settings(),
        "corpus": _corpus_facts(corpus),
        "command": plan.command(),
        "notes": _notes(plan),
    }
    write_json(config.out / RESULTS, output)
    return output


def _run(plan: Plan, corpus: Corpus, console: Console) -> list[dict[str, Any]]:
    root = plan.config.out / TRIALS
    key = CorpusKey(corpus.description["fingerprint"], corpus.vocab_size)
    first = plan.first_trials(key)
    num_later = 0 if plan.config.full_grid else (len(plan.config.seeds) - 1) * len(plan.placements)
    with Display(console, len(first) + num_later, plan.training.steps) as display:
        executor = LocalExecutor(
            plan.jobs, on_start=display.start, on_progress=display.progress, on_finish=display.finish
        )
        results = executor.run(first, root, corpus.path)
        return results + executor.run(plan.later_trials(results, key), root, corpus.path)


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """The corpus in flat form for the results: counts by side, what was skipped and why."""
    description = corpus.description
    counts = {
        f"{count}_{side}": description[count][side]
        for count in ("num_documents", "num_bytes", "num_tokens")
        for side in ("train", "val")
    }
    skipped = ", ".join(f"{count} x {reason}" for reason, count in description["skipped"].items())
    names = description["sources"]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return {
        "name": ", ".join(names[:_NAMES_SHOWN]) + more,
        **counts,
        "bytes_per_token": description["bytes_per_token"],
        "vocab_size": description["vocab_size"],
        "skipped": skipped or "nothing",
        "notes": " ".join(description["notes"]) or "none",
        "fingerprint": description["fingerprint"],
    }


def _check_folder(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"`out` {out} is a file; name a folder")
    if out.exists() and any(out.iterdir()):
        if not resume:
            raise UserError(f"`out` {out} is not empty; add --resume to continue what it holds, or name another folder")
        if not (out / CONFIG).exists():
            raise UserError(f"`out` {out} holds no comparison ({CONFIG} is missing); name another folder")


def _claim_folder(out: Path, resolved: dict[str, Any]) -> None:
    path = out / CONFIG
    if path.exists():
        try:
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
            differing = _first_difference({**before["settings"], "data": before["corpus_fingerprint"]}, resolved)
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}; name another folder") from error
        if differing:
            raise UserError(f"{differing} in {out}; give the same value to resume it, or name another folder")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(json.loads(json.dumps(resolved)), sort_keys=False), encoding="utf-8")


def _first_difference(before: dict[str, Any], resolved: dict[str, Any]) -> str | None:
    now = {**resolved["settings"], "data": resolved["corpus_fingerprint"]}
    for key in now:
        if before.get(key) != now[key]:
            was = "other text" if key == "data" else before.get(key)
            return f"`{key}` is {'this text' if key == 'data' else now[key]} now but was {was}"
    return None


def _check_windows(plan: Plan, corpus: Corpus) -> None:
    for part in (corpus.train, corpus.val):
        Windows(part, length=plan.training.length, seed=0)


def _notes(plan: Plan) -> list[str]:
    notes = []
    if plan.config.lrs:
        notes.append("Every placement was tried at the same learning rates and is shown at its own best.")
    elif all(len(rates) == 1 for rates in plan.rates):
        notes.append(
            "Each placement runs at its own learning rate, because one rate for all decides the ranking. "
            + plan.preset.tuned
        )
    else:
        notes.append("Each placement was tried at the preset's learning rates and is shown at its own best.")
    if any(len(rates) > 1 for rates in plan.rates) and not plan.config.full_grid and len(plan.config.seeds) > 1:
        notes.append(
            f"Seed {plan.config.seeds[0]} chose each placement's learning rate; the other seeds ran at that rate "
            "alone. The choosing seed is part of the mean, which favours every placement alike."
        )
    return [note.strip() for note in notes]
