"""Runs trials on the machines of a Ray cluster; every file of the results is written by this side alone."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from geonorm.errors import UserError
from geonorm.experiments.cluster import Cluster, ClusterOptions
from geonorm.experiments.corpus_transfer import CorpusOffer, corpus_files, corpus_key, read_pieces
from geonorm.experiments.local import Executor
from geonorm.experiments.process import Running, clear_folder
from geonorm.experiments.trials import LOG, METRICS, RESULT, Trial, read_result

_POLL_SECONDS = 0.3


@dataclasses.dataclass(eq=False)
class _Attempt(Running):
    """One try at a trial; ``number`` counts from 1."""

    folder: Path = dataclasses.field(kw_only=True)
    number: int = dataclasses.field(kw_only=True)
    host: str = ""
    started: float = dataclasses.field(default_factory=time.monotonic)
    ended: dict[str, Any] | None = None
    lost: str = ""
    no_corpus: bool = False


class RayExecutor(Executor):
    """Runs each trial as a Ray task with CPUs or GPUs of its own; see :class:`Executor`.

    A trial whose worker or machine is lost starts anew elsewhere, ``options.retries`` times at most; one that ends with
    an error does not, since it would again. Tasks send their output here and write nothing that lasts, so that a task
    that outlives this process cannot touch the results.

    Args:
        options: of the cluster and of each trial.
        jobs: most trials at a time; None for as many as the cluster takes.
        on_note: is given a line for the user now and then.
        callbacks: see :class:`Executor`.

    Raises:
        UserError: on entry: ray is not installed, no cluster answers, or a machine runs other code than this one.
    """

    def __init__(
        self,
        options: ClusterOptions,
        *,
        jobs: int | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        **callbacks: Any,
    ) -> None:
        super().__init__(**callbacks)
        self.options, self.jobs, self.on_note = options, jobs, on_note
        self.cluster = Cluster(options)

    def __enter__(self) -> RayExecutor:
        try:
            self.cluster.connect(self.on_note)
        except BaseException:
            self.cluster.disconnect()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.disconnect()

    def environment(self) -> dict[str, Any]:
        """See :meth:`Executor.environment`."""
        return self.cluster.environment()

    def run(self, trials: Iterable[Trial], root: Path, corpus: Path) -> list[dict[str, Any]]:
        """See :meth:`Executor.run`."""
        trials = list(trials)
        results = self.take_finished(trials, root)
        for trial in trials:
            if trial.id in results:
                self.on_finish(trial, results[trial.id])
        unfinished = [trial for trial in trials if trial.id not in results]
        if unfinished:
            results |= _Run(self, root, corpus).run(unfinished)
        return [results[trial.id] for trial in trials]


class _Run:
    """One call of :meth:`RayExecutor.run`."""

    def __init__(self, executor: RayExecutor, root: Path, corpus: Path) -> None:
        self.executor, self.cluster = executor, executor.cluster
        self.root, self.corpus = root, corpus
        key = corpus_key(corpus)
        assert key is not None
        self.offer = CorpusOffer(str(corpus), key)
        self.flying: dict[Any, _Attempt] = {}
        self.shown: set[str] = set()

    def run(self, trials: list[Trial]) -> dict[str, dict[str, Any]]:
        waiting = collections.deque(self._attempt(trial, 1) for trial in trials)
        results: dict[str, dict[str, Any]] = {}
        try:
            while waiting or self.flying:
                while waiting and (self.executor.jobs is None or len(self.flying) < self.executor.jobs):
                    attempt = waiting.popleft()
                    self.flying[self.cluster.submit(attempt.trial, self.offer)] = attempt
                for stream in self.cluster.ready(self.flying, _POLL_SECONDS):
                    attempt = self.flying[stream]
                    event = self.cluster.next(stream)
                    if event is not None:
                        self._take(attempt, event)
                        continue
                    del self.flying[stream]
                    if (again := self._again(attempt)) is not None:
                        waiting.append(again)
                    else:
                        results[attempt.trial.id] = self._result(attempt)
                        self.executor.on_finish(attempt.trial, results[attempt.trial.id])
        finally:
            self.cluster.cancel(self.flying)
        return results

    def _attempt(self, trial: Trial, number: int) -> _Attempt:
        return _Attempt(trial, folder=self.root / trial.id, number=number)

    def _take(self, attempt: _Attempt, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "started":
            attempt.host, attempt.started = event["host"], time.monotonic()
            clear_folder(attempt.folder, attempt.trial)
            if attempt.trial.id not in self.shown:
                self.shown.add(attempt.trial.id)
                self.executor.on_start(attempt)
        elif kind == "metrics":
            with (attempt.folder / METRICS).open("ab") as file:
                file.write(event["lines"])
            attempt.add_metrics(event["lines"])
            self.executor.on_progress(attempt)
        elif kind == "ended":
            attempt.ended = event
            if event["returncode"] < 0:
                attempt.lost = f"the trial's process was {event['reason']}"
        elif kind == "lost":
            attempt.lost = event["reason"]
        elif kind == "no corpus":
            attempt.no_corpus = True
        else:
            raise UserError(event["message"])

    def _again(self, attempt: _Attempt) -> _Attempt | None:
        """The next attempt at a trial whose attempt has ended, or None if that was the last."""
        if attempt.no_corpus:
            if self.offer.pieces is None:
                self.executor.on_note("a machine does not see the corpus; sending it through Ray")
                self.offer = dataclasses.replace(self.offer, pieces=self._put_pieces())
            return self._attempt(attempt.trial, attempt.number)
        if attempt.ended is None and not attempt.lost:
            attempt.lost = "the task ended without a word"
        if not attempt.lost or attempt.number > self.executor.options.retries:
            return None
        self.executor.on_note(f"{attempt.trial.id}: {attempt.lost}; starting it anew")
        return self._attempt(attempt.trial, attempt.number + 1)

    def _put_pieces(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        return tuple(
            (path.name, tuple(self.cluster.put(piece) for piece in read_pieces(path)))
            for path in corpus_files(self.corpus)
        )

    def _result(self, attempt: _Attempt) -> dict[str, Any]:
        """Write what the trial sent home, its result last, and return the result."""
        clear_folder(attempt.folder, attempt.trial)
        files = dict(attempt.ended["files"]) if attempt.ended else {}
        # Last, and whole or absent: with it the trial counts as finished.
        final = files.pop(RESULT, None)
        for name, content in files.items():
            (attempt.folder / name).write_bytes(content)
        if attempt.ended and attempt.ended["returncode"] == 0 and final is not None:
            partial = attempt.folder / f"{RESULT}.{os.getpid()}.partial"
            partial.write_bytes(final)
            partial.replace(attempt.folder / RESULT)
            if (result := read_result(attempt.folder, attempt.trial)) is not None:
                return result
        reason = attempt.lost or (attempt.ended or {})["reason"]
        message = f"{reason} (attempt {attempt.number}, on {attempt.host or 'no machine'})"
        if LOG in files:
            message += f"; see {attempt.folder / LOG}"
        return attempt.trial.result("failed", message, seconds=time.monotonic() - attempt.started)
