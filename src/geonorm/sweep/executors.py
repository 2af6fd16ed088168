"""Runs trials side by side, each a process of its own on this machine; what Ray does otherwise is in `on_ray`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from geonorm.report.results import Trial as TrialResult
from geonorm.sweep.trial import Trial
from geonorm.training import recipe
from geonorm.training.folder import METRICS
from geonorm.training.result import RunResult

_POLL_SECONDS = 0.3
_END_SECONDS = 20
_CAUSE = re.compile(r"(\[rank\d+\]: )?(error: |[\w.]*(Error|Exception|Interrupt)\b)")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a trial may use, and what its numbers rest on besides its configuration.

    Attributes:
        threads: of each of its processes; ranks: how many there are.
        step_impl: implementation of the step that the comparison has on CPUs; None where that is not decided.
        gpu: number of the GPU, if it has one.
    """

    threads: int = 1
    ranks: int = 1
    step_impl: str | None = None
    gpu: int | None = None


class Handle(Protocol):
    """A trial under way."""

    def failure(self) -> str | None:
        """Why it left no result, "" if it may have left one; None while it runs."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to save what it has and end, without waiting."""
        ...

    def end(self) -> None:
        """Wait until it has ended, and make it end if it does not."""
        ...


@dataclasses.dataclass
class Running:
    """A trial under way, for a display.

    Attributes:
        row: its latest metrics.
    """

    trial: Trial
    folder: Path
    handle: Handle
    started: float = dataclasses.field(default_factory=time.monotonic)
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    offset: int = 0

    def poll_metrics(self) -> None:
        """Take in the whole rows that the trial has written since the last call."""
        try:
            with (self.folder / METRICS).open("rb") as file:
                # A run that goes on from a checkpoint cuts off what came after it.
                self.offset = min(self.offset, file.seek(0, os.SEEK_END))
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        rows = data[: data.rfind(b"\n") + 1]
        self.offset += len(rows)
        for line in rows.splitlines():
            try:
                self.row.update(json.loads(line))
            except ValueError:
                continue

    def result(self, failure: str) -> TrialResult:
        """Result of a trial that has ended; status ``"failed"`` if it left none."""
        found = None if failure else self.trial.read_result(self.folder)
        if found is not None:
            return found
        message = f"{failure or 'it left no result'}; see {log_path(self.folder)}"
        return self.trial.result(RunResult(status="failed", message=message, seconds=time.monotonic() - self.started))


def spec_path(folder: Path) -> Path:
    """Where the configuration of a trial stands, beside its folder."""
    return folder.with_name(f"{folder.name}.yaml")


def log_path(folder: Path, rank: int = 0) -> Path:
    """Where the output of a trial's process stands, beside its folder."""
    return folder.with_name(f"{folder.name}.rank{rank}.log" if rank else f"{folder.name}.log")


class TrialProcess:
    """A trial that runs in a process on this machine; should this process be killed, the trial ends.

    Args:
        folder: of the trial; its configuration stands beside it.
        resources: of each process.
        rank: which of the trial's ranks this process is.
        main: ``host:port`` where ranks on several machines meet; empty where all of them run on this machine, started
            by torch's launcher.
    """

    def __init__(self, folder: Path, resources: Resources, rank: int = 0, main: str = "") -> None:
        self.folder, self.log_path, self.gpu = folder, log_path(folder, rank), resources.gpu
        launcher = [sys.executable]
        if resources.ranks > 1 and not main:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
            launcher += [f"--nproc-per-node={resources.ranks}"]
        command = [*launcher, "-m", "geonorm.sweep.trial", str(spec_path(folder)), str(folder)]
        command += ["--threads", str(resources.threads), "--end-with-parent"]
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(resources.threads)), "HF_HUB_OFFLINE": "1"}
        if main:
            host, _, port = main.rpartition(":")
            # A process sees the GPU that is its own, and no other.
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(resources.ranks), "LOCAL_RANK": "0"}
            environment |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        if resources.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(resources.gpu)
        if resources.step_impl == "cpp":
            command.append("--kernels")
        elif resources.step_impl is not None:
            # Kernels that somebody builds meanwhile must not change what later trials run.
            environment["GEONORM_CPP"] = "0"
        self.log: IO[bytes] = self.log_path.open("ab")
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            # Nothing is ever written to it. The system closes it when this process ends in whatever way.
            stdin=subprocess.PIPE,
            env=environment,
        )

    def failure(self) -> str | None:
        """See :class:`Handle`."""
        code = self.process.poll()
        if code is None:
            return None
        self._close()
        # Of a run that diverged the exit code is 1 as well; its result tells.
        if code == 0 or (code == 1 and (self.folder / "result.json").exists()):
            return ""
        said = last_words(self.log_path.read_text(encoding="utf-8", errors="replace"))
        return f"killed by signal {-code} ({said})" if code < 0 else f"exit code {code}: {said}"

    def ask_to_end(self) -> None:
        """See :class:`Handle`."""
        self.process.terminate()

    def end(self) -> None:
        """See :class:`Handle`."""
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close()

    def _close(self) -> None:
        self.log.close()
        if self.process.stdin:
            self.process.stdin.close()


def last_words(log: str) -> str:
    """The line of a log that says why its process failed.

    That is the last one, unless a launcher of ranks had the last word, which tells nothing of the cause.
    """
    lines = [line.strip() for line in log.strip().splitlines()] or ["no output"]
    if lines[-1].strip("="):
        return lines[-1]
    causes = [line for line in lines if _CAUSE.match(line) and "ChildFailedError" not in line]
    return re.sub(r"^\[rank\d+\]: ", "", causes[-1]) if causes else "the launcher of the ranks does not say"


class Executor:
    """Runs trials, at most ``jobs`` at a time, and tells a display how they get on; a context manager.

    Args:
        jobs: trials side by side.
        resources: what each may use; ``gpus`` are dealt out to them, one each, if there are any.
        on_start, on_progress, on_finish: called from the caller's thread.
    """

    def __init__(
        self,
        jobs: int,
        resources: Resources,
        gpus: int = 0,
        *,
        on_start: Callable[[Running], None] = lambda running: None,
        on_progress: Callable[[Running], None] = lambda running: None,
        on_finish: Callable[[Trial, TrialResult], None] = lambda trial, result: None,
    ) -> None:
        self.jobs, self.resources = jobs, resources
        self.free = [gpu for _ in range(-(-jobs // gpus)) for gpu in range(gpus)] if gpus else []
        self.on_start, self.on_progress, self.on_finish = on_start, on_progress, on_finish

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def environment(self) -> dict[str, Any]:
        """What the results should say of where the trials ran, beyond this machine."""
        return {"threads_per_trial": self.resources.threads * self.resources.ranks}

    def start(self, folder: Path) -> Handle:
        """Start the trial whose configuration stands beside ``folder``, from its last checkpoint if it has one."""
        resources = dataclasses.replace(self.resources, gpu=self.free.pop(0)) if self.free else self.resources
        return TrialProcess(folder, resources)

    def run(self, trials: list[Trial], root: Path) -> list[TrialResult]:
        """Run trials, each in ``root/<trial id>``; returns their results in the order of the trials.

        A trial whose folder holds its result already is not run again. One that dies becomes a result with status
        ``"failed"``; the others go on. On an interrupt every trial is ended first.

        Raises:
            UserError: a folder holds the finished result of another trial, which this would overwrite.
        """
        root.mkdir(parents=True, exist_ok=True)
        finished = {trial.id: trial.read_result(root / trial.id) for trial in trials}
        waiting, running = list(reversed(trials)), list[Running]()
        results: dict[str, TrialResult] = {}

        def finish(trial: Trial, result: TrialResult) -> None:
            results[trial.id] = result
            self.on_finish(trial, result)

        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    trial = waiting.pop()
                    if (found := finished[trial.id]) is not None:
                        finish(trial, found)
                        continue
                    folder = root / trial.id
                    recipe.save(spec_path(folder), trial.config)
                    # In the list before anyone is told, so that an interrupt from here on ends it too.
                    running.append(Running(trial, folder, self.start(folder)))
                    self.on_start(running[-1])
                for item in list(running):
                    item.poll_metrics()
                    if (failure := item.handle.failure()) is None:
                        self.on_progress(item)
                        continue
                    running.remove(item)
                    self.release(item.handle)
                    finish(item.trial, item.result(failure))
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for item in running:
                item.handle.ask_to_end()
            for item in running:
                item.handle.end()
        return [results[trial.id] for trial in trials]

    def release(self, handle: Handle) -> None:
        """Let others have what a trial used that has ended."""
        if isinstance(handle, TrialProcess) and handle.gpu is not None:
            self.free.append(handle.gpu)
