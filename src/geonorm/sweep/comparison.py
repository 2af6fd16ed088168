"""``geonorm compare``: prepare the text, run the trials, summarise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from geonorm import data
from geonorm.errors import UserError, check_folder_path
from geonorm.ops import ensure_cpu_kernels
from geonorm.provenance import environment, num_cores
from geonorm.report.results import FORMAT, Results, write_results
from geonorm.report.results import Trial as TrialResult
from geonorm.storage import write_text
from geonorm.sweep.axes import Corpus, Sweep
from geonorm.sweep.display import Display
from geonorm.sweep.executors import Executor, Resources
from geonorm.sweep.on_ray import RayExecutor
from geonorm.sweep.rates import MORE_ROUNDS
from geonorm.sweep.ray_ranks import RayOptions
from geonorm.sweep.summary import summarize
from geonorm.sweep.trial import Trial
from geonorm.training import recipe
from geonorm.training.folder import locked
from geonorm.training.setup import check_model, corpus_identity, open_corpus

CONFIG, TRIALS = "config.yaml", "trials"
_NAMES_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Machines:
    """Where trials run.

    Attributes:
        jobs: trials side by side; None for as many as there are cores, GPUs, or what the cluster takes.
        ranks: processes that train one trial together.
        ray: the Ray cluster; None for this machine alone.
    """

    jobs: int | None = None
    ranks: int = 1
    ray: RayOptions | None = None


def compare(
    sweep: Sweep, out: Path, machines: Machines, console: Console, *, command: str, resume: bool = False
) -> Results:
    """Run a comparison and write ``results.json`` to ``out``, anew after every trial; returns its content.

    Raises:
        UserError: the options do not fit together, the data cannot be read, or ``out`` holds something else.
    """
    _check_folder(out, resume)
    if machines.ranks > 1:
        sweep = sweep.with_run(lambda run: run if run.parallel != "none" else dataclasses.replace(run, parallel="ddp"))
    for config in sweep.variants.values():
        check_model(config)
        parts = machines.ranks * config.accumulation
        if config.global_batch_size % parts:
            raise UserError(
                f"`global_batch_size` {config.global_batch_size} is not a multiple of {machines.ranks} ranks times "
                f"`accumulation` {config.accumulation}"
            )
    first = next(iter(sweep.variants.values()))
    corpus = open_corpus(
        first, lambda text: console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
    )
    # A small text yields fewer ids than were asked for, and a prepared one has its own.
    sweep = sweep.with_run(
        lambda run: dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=corpus.vocab_size))
    )
    num_windows = {}
    for config in sweep.variants.values():
        for side in ("train", "val", "test"):
            num_windows[side] = data.Windows(getattr(corpus, side), length=config.data.seq_len).num_windows
    known = Corpus(corpus.path, corpus_identity(corpus), corpus.description["fingerprint"])
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, "running a comparison"):
        step_impl = _decide_step(out, sweep)
        _claim(out, sweep, known, step_impl)
        facts = {"corpus": _corpus_facts(corpus), "num_windows": num_windows, "command": command}
        return _Comparison(sweep, out, machines, known, console, facts, step_impl).run()


class _Comparison:
    def __init__(
        self,
        sweep: Sweep,
        out: Path,
        machines: Machines,
        corpus: Corpus,
        console: Console,
        facts: dict[str, Any],
        step_impl: str | None,
    ) -> None:
        self.sweep, self.out, self.machines, self.corpus, self.console = sweep, out, machines, corpus, console
        self.facts, self.step_impl = facts, step_impl
        self.results: dict[str, TrialResult] = {}
        self.ran_on: dict[str, Any] = {}
        self.order: list[str] = []
        self.complete = False

    def run(self) -> Results:
        """Run every trial that is not finished; the results file is whole at any time."""
        with Display(self.console) as display:

            def finish(trial: Trial, result: TrialResult) -> None:
                self.results[trial.id] = result
                display.finish(trial, result)
                self.write()

            callbacks = {"on_start": display.start, "on_progress": display.progress, "on_finish": finish}
            with self.executor(lambda line: display.say(line, style="dim"), callbacks) as executor:
                self.ran_on = executor.environment()

                def run(trials: list[Trial]) -> list[TrialResult]:
                    self.order += [trial.id for trial in trials]
                    display.expect(trials)
                    return executor.run(trials, self.out / TRIALS)

                found = run(self.sweep.first_trials(self.corpus))
                for _ in range(1 + MORE_ROUNDS):
                    trials = self.sweep.refining_trials(found, self.corpus)
                    if not trials:
                        break
                    found += run(trials)
                run(self.sweep.later_trials(found, self.corpus))
        self.complete = True
        return self.write()

    def executor(self, note: Callable[[str], None], callbacks: dict[str, Any]) -> Executor:
        """Make the executor that the options ask for."""
        ray, jobs = self.machines.ray, self.machines.jobs
        if ray is not None:
            ray = dataclasses.replace(ray, step_impl=self.step_impl)
            return RayExecutor(ray, jobs, (self.out / CONFIG, self.corpus.path), note, **callbacks)
        gpus = _num_gpus(next(iter(self.sweep.variants.values())).device)
        resources = Resources(ranks=self.machines.ranks, step_impl=self.step_impl)
        return Executor(jobs or gpus or num_cores(), resources, gpus, **callbacks)

    def write(self) -> Results:
        """Write the results of all trials so far and return them."""
        root = self.out / TRIALS
        # The order of the plan, not that in which trials happened to end, so that equal runs give equal files.
        trials = tuple(self.results[name] for name in self.order if name in self.results)
        rates = self.sweep.rate_facts(self.corpus.fingerprint)
        design = self.sweep.design(rates, self.complete)
        summary, variants = summarize(trials, root, design, self.sweep.values)
        results = Results(
            trials=trials,
            summary=summary,
            variants=variants,
            rates=rates,
            complete=self.complete,
            num_other_trials=sum(path.is_dir() and path.name not in self.results for path in root.iterdir()),
            environment={**environment(), **self.ran_on},
            settings=self.sweep.shared(),
            **self.facts,
        )
        write_results(self.out, results)
        return results


def _num_gpus(device: str) -> int:
    import torch

    return 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def _check_folder(out: Path, resume: bool) -> None:
    check_folder_path("out", out)
    if out.exists() and any(out.iterdir()):
        if not resume:
            raise UserError(f"`out` {out} is not empty; add --resume to continue what it holds, or name another folder")
        if not (out / CONFIG).exists():
            raise UserError(f"`out` {out} holds no comparison ({CONFIG} is missing); name another folder")


def _decide_step(out: Path, sweep: Sweep) -> str | None:
    """Build the C++ kernels of the step first where trials would use them; they run what the first of them ran."""
    runs = sweep.variants.values()
    if all(run.compile for run in runs) or _num_gpus(next(iter(runs)).device):
        return None
    if all(placement.name != "geonorm" for placement in sweep.placements):
        return None
    before = recipe.read_file(out / CONFIG).get("step_impl") if (out / CONFIG).exists() else None
    return ensure_cpu_kernels(wait=True, recorded=before)


def _claim(out: Path, sweep: Sweep, corpus: Corpus, step_impl: str | None) -> None:
    """Write the configuration of the comparison, if the folder does not hold another one."""
    path = out / CONFIG
    now = {
        "format": FORMAT,
        "corpus_fingerprint": corpus.fingerprint,
        "step_impl": step_impl,
        "settings": recipe.nested_all(sweep.shared()),
    }
    if path.exists():
        _check_same(path, now)
    axes = recipe.resolved(sweep.axes)
    write_text(path, recipe.dump_data({**now, recipe.COMPARE: axes}))
    (out / TRIALS).mkdir(exist_ok=True)


def _check_same(path: Path, now: dict[str, Any]) -> None:
    saved = recipe.read_file(path)
    if saved.get("format") != FORMAT or not isinstance(saved.get("settings"), dict):
        raise UserError(f"{path.parent} holds a comparison of another version of geonorm; name another folder")
    remedy = "give the same to resume it, or name another folder"
    if saved.get("corpus_fingerprint") != now["corpus_fingerprint"]:
        raise UserError(f"`data` is this text now but was other text in {path.parent}; {remedy}")
    before, after = (recipe.flat(one["settings"]) for one in (saved, now))
    for key in after.keys() | before.keys():
        if before.get(key) != after.get(key):
            raise UserError(f"`{key}` is {after.get(key)} now but was {before.get(key)} in {path.parent}; {remedy}")


def _corpus_facts(corpus: Any) -> dict[str, Any]:
    """The corpus in flat form for the results: counts by side, what was skipped and why."""
    description = corpus.description
    names = description["sources"]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    counts = {
        f"{count}_{side}": description[count][side]
        for count in ("num_documents", "num_bytes", "num_tokens", "num_labels")
        if count in description
        for side in ("train", "val", "test")
    }
    for side in ("val", "test"):
        counts |= {
            f"num_groups_{side}": description["num_groups"][side],
            f"largest_share_{side}": description["largest_share"][side],
            f"overlap_{side}": description["overlap"][side],
        }
    counts["overlap_ngram"] = description["overlap"]["ngram"]
    skipped = ", ".join(f"{count} x {reason}" for reason, count in description["skipped"].items())
    return {
        "name": ", ".join(names[:_NAMES_SHOWN]) + more,
        **counts,
        "bytes_per_token": description["bytes_per_token"],
        "vocab_size": description["vocab_size"],
        "skipped": skipped or "nothing",
        "notes": " ".join(description["notes"]) or "none",
        "fingerprint": description["fingerprint"],
    }
