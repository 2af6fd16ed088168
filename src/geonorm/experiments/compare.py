"""``geonorm compare``: prepare the text, run the trials, summarise, report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from rich.console import Console

from geonorm.data import VOCAB_SIZE, Corpus, Windows, prepare, prepared
from geonorm.errors import UserError, check_folder_path
from geonorm.experiments.config import CompareConfig
from geonorm.experiments.display import Display
from geonorm.experiments.environment import environment
from geonorm.experiments.local import Executor, LocalExecutor
from geonorm.experiments.notes import corpus_facts, notes, rate_facts
from geonorm.experiments.plan import CorpusKey, Plan, make_plan
from geonorm.experiments.rates import MORE_ROUNDS
from geonorm.experiments.remote import RayExecutor
from geonorm.experiments.summary import summarize
from geonorm.experiments.trials import Trial
from geonorm.storage import write_json, write_text

CONFIG = "config.yaml"
RESULTS = "results.json"
TRIALS = "trials"
# The report refuses results of another format, in which the same words can stand for other numbers.
FORMAT = 2
_LOCK = ".lock"


def compare(config: CompareConfig, console: Console) -> dict[str, Any]:
    """Run a comparison and write ``results.json`` to ``config.out``, anew after every trial; returns its content.

    Raises:
        UserError: the options do not fit together, the data cannot be read, or ``config.out`` holds something else.
    """
    plan = make_plan(config)
    _check_folder(config.out, config.resume)
    corpus = prepare(
        list(config.data) or None,
        # The vocabulary of a preset is none that was asked for.
        vocab_size=VOCAB_SIZE if config.vocab_size is None and prepared(config.data) else plan.vocab_size,
        report=lambda text: console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True),
    )
    if corpus.description["settings"].get("vocab_size") != plan.vocab_size:  # it was prepared beforehand
        plan = dataclasses.replace(plan, vocab_size=corpus.vocab_size)
    for part in (corpus.train, corpus.val, corpus.test):
        Windows(part, length=plan.training.length)
    fingerprint = corpus.description["fingerprint"]
    with _claimed(config.out, {"format": FORMAT, **plan.resolved(), "corpus_fingerprint": fingerprint}):
        return _Comparison(plan, corpus, console).run()


class _Comparison:
    def __init__(self, plan: Plan, corpus: Corpus, console: Console) -> None:
        self.plan, self.corpus, self.console = plan, corpus, console
        self.key = CorpusKey(corpus.description["fingerprint"], corpus.vocab_size)
        self.out = plan.config.out
        self.results: dict[str, dict[str, Any]] = {}
        self.ran_on: dict[str, Any] = {}
        self.order: list[str] = []
        self.complete = False

    def run(self) -> dict[str, Any]:
        """Run every trial that is not finished; the results file is whole at any time."""
        with Display(self.console, self.plan.training.steps) as display:

            def finish(trial: Trial, result: dict[str, Any]) -> None:
                self.results[trial.id] = result
                display.finish(trial, result)
                self.write()

            callbacks = {"on_start": display.start, "on_progress": display.progress, "on_finish": finish}
            with self.executor(display.note, callbacks) as executor:
                self.ran_on = executor.environment()

                def run(trials: list[Trial]) -> list[dict[str, Any]]:
                    self.order += [trial.id for trial in trials]
                    display.expect(len(trials))
                    return executor.run(trials, self.out / TRIALS, self.corpus.path)

                found = run(self.plan.first_trials(self.key))
                for _ in range(1 + MORE_ROUNDS):
                    trials = self.plan.refining_trials(found, self.key)
                    if not trials:
                        break
                    found += run(trials)
                run(self.plan.later_trials(found, self.key))
        self.complete = True
        return self.write()

    def executor(self, note: Callable[[str], None], callbacks: dict[str, Any]) -> Executor:
        """Make the executor that the options ask for."""
        if self.plan.cluster is None:
            return LocalExecutor(self.plan.jobs, **callbacks)
        return RayExecutor(self.plan.cluster, jobs=self.plan.config.jobs, on_note=note, **callbacks)

    def write(self) -> dict[str, Any]:
        """Write the results of all trials so far and return them."""
        root = self.out / TRIALS
        # The order of the plan, not that in which trials happened to end, so that equal runs give equal files.
        trials = [self.results[name] for name in self.order if name in self.results]
        unnamed = sum(1 for folder in root.iterdir() if folder.is_dir() and folder.name not in self.results)
        output = {
            "format": FORMAT,
            "trials": trials,
            **summarize(trials, root, self.plan.design(self.complete)),
            "rates": rate_facts(self.plan),
            "environment": {**environment(), **self.ran_on},
            "settings": self.plan.settings(),
            "corpus": corpus_facts(self.corpus),
            "command": self.plan.command(),
            "notes": notes(self.plan, self.corpus, trials, self.complete, unnamed),
        }
        write_json(self.out / RESULTS, output)
        return output


def _check_folder(out: Path, resume: bool) -> None:
    check_folder_path("out", out)
    if out.exists() and any(out.iterdir()):
        if not resume:
            raise UserError(f"`out` {out} is not empty; add --resume to continue what it holds, or name another folder")
        if not (out / CONFIG).exists():
            raise UserError(f"`out` {out} holds no comparison ({CONFIG} is missing); name another folder")


@contextlib.contextmanager
def _claimed(out: Path, resolved: dict[str, Any]) -> Iterator[None]:
    """The folder for this process alone, with the configuration written to it."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"another process is running a comparison in {out}; wait for it or name another `out`"
        ) from None
    try:
        path = out / CONFIG
        if path.exists():
            _check_same(path, resolved)
        write_text(path, yaml.safe_dump(json.loads(json.dumps(resolved)), sort_keys=False))
        (out / TRIALS).mkdir(exist_ok=True)
        yield
    finally:
        lock.release()


def _check_same(path: Path, resolved: dict[str, Any]) -> None:
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        before = {**saved["settings"], "data": saved["corpus_fingerprint"]}
        version = saved.get("format")
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}; name another folder") from error
    if version != FORMAT:
        raise UserError(f"{path.parent} holds a comparison of another version of geonorm; name another folder")
    now = {**resolved["settings"], "data": resolved["corpus_fingerprint"]}
    for key, value in now.items():
        if before.get(key) != value:
            change = (
                "is this text now but was other text" if key == "data" else f"is {value} now but was {before.get(key)}"
            )
            raise UserError(f"`{key}` {change} in {path.parent}; give the same to resume it, or name another folder")
