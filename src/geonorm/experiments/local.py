"""Runs trials side by side on this machine, one process with one thread each."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from geonorm.errors import UserError
from geonorm.experiments.trials import (
    LOG,
    METRICS,
    RESULT,
    SPEC,
    WINDOW_LOSSES,
    Trial,
    folder_holds_another,
    read_result,
)
from geonorm.storage import write_json

_POLL_SECONDS = 0.3
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass
class Running:
    """One trial under way; ``row`` is its latest line of metrics."""

    trial: Trial
    folder: Path
    process: subprocess.Popen
    log: IO[bytes]
    started: float
    offset: int = 0
    row: dict[str, Any] = dataclasses.field(default_factory=dict)

    def poll_metrics(self) -> None:
        """Read what the trial has written since the last call."""
        path = self.folder / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            self.row.update(json.loads(line))


class LocalExecutor:
    """Runs trials with at most ``jobs`` at a time.

    Args:
        jobs: number of processes.
        on_start, on_progress, on_finish: called from the caller's thread, for a live display.
    """

    def __init__(
        self,
        jobs: int,
        *,
        on_start: Callable[[Running], None] = lambda running: None,
        on_progress: Callable[[Running], None] = lambda running: None,
        on_finish: Callable[[Trial, dict[str, Any]], None] = lambda trial, result: None,
    ) -> None:
        self.jobs = jobs
        self.on_start, self.on_progress, self.on_finish = on_start, on_progress, on_finish

    def run(self, trials: Iterable[Trial], root: Path, corpus: Path) -> list[dict[str, Any]]:
        """Run trials, each in ``root/<trial id>``, and return their results in the order of the trials.

        A trial whose folder holds its result already is not run again. One that dies becomes a result with status
        ``"failed"`` and the last line of its log; the others go on. On an interrupt every process is ended first.

        Raises:
            UserError: a folder holds the finished result of another trial, which this would overwrite.
        """
        trials = list(trials)
        for trial in trials:
            if folder_holds_another(root / trial.id, trial):
                raise UserError(
                    f"{root / trial.id} holds the result of a trial with other settings or defaults; name another `out`"
                )
        waiting = list(reversed(trials))
        running: list[Running] = []
        results: dict[str, dict[str, Any]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    trial = waiting.pop()
                    folder = root / trial.id
                    kept = read_result(folder, trial)
                    if kept is None:
                        # In the list before anyone is told, so that an interrupt from here on ends it too.
                        running.append(self._start(trial, folder, corpus))
                        self.on_start(running[-1])
                    else:
                        results[trial.id] = kept
                        self.on_finish(trial, kept)
                for item in list(running):
                    item.poll_metrics()
                    if item.process.poll() is None:
                        self.on_progress(item)
                        continue
                    running.remove(item)
                    results[item.trial.id] = self._finish(item)
                    self.on_finish(item.trial, results[item.trial.id])
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for item in running:
                item.process.terminate()
            for item in running:
                item.process.wait()
                item.log.close()
        return [results[trial.id] for trial in trials]

    def _start(self, trial: Trial, folder: Path, corpus: Path) -> Running:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, METRICS, WINDOW_LOSSES, LOG):
            (folder / name).unlink(missing_ok=True)
        write_json(folder / SPEC, trial.to_json())
        log = (folder / LOG).open("wb")
        command = [sys.executable, "-m", "geonorm.experiments.worker", str(folder), str(corpus)]
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1"), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        return Running(trial, folder, process, log, time.monotonic())

    def _finish(self, item: Running) -> dict[str, Any]:
        item.log.close()
        result = read_result(item.folder, item.trial)
        if item.process.returncode == 0 and result is not None:
            return result
        message = f"{_reason(item)}; see {item.folder / LOG}"
        return item.trial.result("failed", message, seconds=time.monotonic() - item.started)


def _reason(item: Running) -> str:
    code = item.process.returncode
    lines = (item.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else "no output"
    return f"killed by signal {-code} ({last})" if code < 0 else f"exit code {code}: {last}"
