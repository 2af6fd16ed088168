"""Runs trials side by side on this machine, one process with one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from geonorm.errors import UserError
from geonorm.experiments.process import Resources, Running, TrialProcess, start_process
from geonorm.experiments.trials import Trial, folder_holds_another, read_result

_POLL_SECONDS = 0.3


class Executor:
    """Runs trials and tells a display how they get on; a context manager.

    Args:
        on_start, on_progress, on_finish: called from the caller's thread.
    """

    def __init__(
        self,
        *,
        on_start: Callable[[Running], None] = lambda running: None,
        on_progress: Callable[[Running], None] = lambda running: None,
        on_finish: Callable[[Trial, dict[str, Any]], None] = lambda trial, result: None,
    ) -> None:
        self.on_start, self.on_progress, self.on_finish = on_start, on_progress, on_finish

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def run(self, trials: Iterable[Trial], root: Path, corpus: Path) -> list[dict[str, Any]]:
        """Run trials, each with its files in ``root/<trial id>``; returns their results in the order of the trials.

        A trial whose folder holds its result already is not run again. One that dies becomes a result with status
        ``"failed"``; the others go on. On an interrupt every trial is ended first.

        Raises:
            UserError: a folder holds the finished result of another trial, which this would overwrite.
        """
        raise AssertionError("an executor defines run")

    def environment(self) -> dict[str, Any]:
        """What the results should say of where the trials ran, beyond this machine."""
        return {}

    def take_finished(self, trials: list[Trial], root: Path) -> dict[str, dict[str, Any]]:
        """Results that earlier runs left, by trial id.

        Raises:
            UserError: as :meth:`run`.
        """
        for trial in trials:
            if folder_holds_another(root / trial.id, trial):
                raise UserError(
                    f"{root / trial.id} holds the result of a trial with other settings or defaults; name another `out`"
                )
        found = {trial.id: read_result(root / trial.id, trial) for trial in trials}
        return {name: result for name, result in found.items() if result is not None}


class LocalExecutor(Executor):
    """Runs trials with at most ``jobs`` at a time, a process each; see :class:`Executor`."""

    def __init__(self, jobs: int, **callbacks: Any) -> None:
        super().__init__(**callbacks)
        self.jobs = jobs

    def run(self, trials: Iterable[Trial], root: Path, corpus: Path) -> list[dict[str, Any]]:
        """See :meth:`Executor.run`. Should this process be killed, the trials' processes end by themselves."""
        trials = list(trials)
        finished = self.take_finished(trials, root)
        waiting = list(reversed(trials))
        running: list[TrialProcess] = []
        results: dict[str, dict[str, Any]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    trial = waiting.pop()
                    if trial.id in finished:
                        results[trial.id] = finished[trial.id]
                        self.on_finish(trial, finished[trial.id])
                    else:
                        # In the list before anyone is told, so that an interrupt from here on ends it too.
                        running.append(self._start(trial, root / trial.id, corpus))
                        self.on_start(running[-1])
                for item in list(running):
                    item.poll_metrics()
                    if item.process.poll() is None:
                        self.on_progress(item)
                        continue
                    running.remove(item)
                    results[item.trial.id] = item.result()
                    self.on_finish(item.trial, results[item.trial.id])
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for item in running:
                item.process.terminate()
            for item in running:
                item.end()
        return [results[trial.id] for trial in trials]

    def _start(self, trial: Trial, folder: Path, corpus: Path) -> TrialProcess:
        return start_process(trial, folder, corpus, Resources())
