"""One trial as a process of its own, and how it ends when whoever started it is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from geonorm.experiments.trials import LOG, METRICS, RESULT, SPEC, TEST_WINDOWS, Trial, read_result
from geonorm.ops.cpp import why_not_cpp
from geonorm.storage import write_json

WATCH_FLAG = "--end-with-parent"
_END_SECONDS = 20
_CAUSE = re.compile(r"(\[rank\d+\]: )?(error: |[\w.]*(Error|Exception|Interrupt)\b)")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a trial's process may use.

    Attributes:
        threads: of each rank.
        device: ``"cpu"`` or ``"cuda"``.
        ranks: processes that train the trial together, on one machine.
        parallel: how they share the model: ``"ddp"``, ``"fsdp"``, or ``"none"`` for one alone.
    """

    threads: int = 1
    device: str = "cpu"
    ranks: int = 1
    parallel: str = "none"


@dataclasses.dataclass
class Running:
    """One trial under way, for a display; ``row`` holds its latest metrics."""

    trial: Trial
    row: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add_metrics(self, lines: bytes) -> None:
        """Take in whole lines of metrics."""
        for line in lines.splitlines():
            self.row.update(json.loads(line))


@dataclasses.dataclass
class TrialProcess(Running):
    """A trial that runs in a process on this machine."""

    folder: Path = dataclasses.field(kw_only=True)
    process: subprocess.Popen = dataclasses.field(kw_only=True)
    log: IO[bytes] = dataclasses.field(kw_only=True)
    started: float = dataclasses.field(default_factory=time.monotonic, kw_only=True)
    offset: int = dataclasses.field(default=0, kw_only=True)
    temporary: bool = dataclasses.field(default=False, kw_only=True)

    def poll_metrics(self) -> bytes:
        """Read the whole lines that the trial has written since the last call."""
        path = self.folder / METRICS
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        self.add_metrics(whole)
        return whole

    def close(self) -> None:
        """Close what this side holds open; a process that still runs ends by it."""
        self.log.close()
        if self.process.stdin:
            self.process.stdin.close()

    def end(self) -> None:
        """End the process if it still runs, and wait for it."""
        if not self.temporary:
            self.process.terminate()
        # One with a temporary folder ends by this and removes the folder, which this process may not live to do.
        self.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def result(self) -> dict[str, Any]:
        """Result of a process that has ended; status ``"failed"`` with the last line of its log if it left none."""
        self.close()
        result = read_result(self.folder, self.trial)
        if self.process.returncode == 0 and result is not None:
            return result
        message = f"{self.reason()}; see {self.folder / LOG}"
        return self.trial.result("failed", message, seconds=time.monotonic() - self.started)

    def reason(self) -> str:
        """Why the process ended as it did, in words."""
        code = self.process.returncode
        said = last_words((self.folder / LOG).read_text(encoding="utf-8", errors="replace"))
        return f"killed by signal {-code} ({said})" if code < 0 else f"exit code {code}: {said}"


def last_words(log: str) -> str:
    """The line of a log that says why its process failed.

    That is the last one, unless a launcher of ranks had the last word, which tells nothing of the cause.
    """
    lines = [line.strip() for line in log.strip().splitlines()] or ["no output"]
    if lines[-1].strip("="):
        return lines[-1]
    causes = [line for line in lines if _CAUSE.match(line) and "ChildFailedError" not in line]
    return re.sub(r"^\[rank\d+\]: ", "", causes[0]) if causes else "the launcher of the ranks does not say"


def clear_folder(folder: Path, trial: Trial) -> None:
    """Make the trial's folder ready for a run from its beginning: nothing of an earlier one is left."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, METRICS, TEST_WINDOWS, LOG):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / SPEC, trial.to_json())


def start_process(
    trial: Trial, folder: Path, corpus: Path, resources: Resources, *, temporary: bool = False
) -> TrialProcess:
    """Start a trial anew in a folder; its output goes to the log there.

    Should this process be killed, the trial ends and, if it is ``temporary``, removes the folder.
    """
    clear_folder(folder, trial)
    log = (folder / LOG).open("wb")
    launcher = [sys.executable]
    if resources.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
        launcher += [f"--nproc-per-node={resources.ranks}"]
    command = [*launcher, "-m", "geonorm.experiments.worker", str(folder), str(corpus)]
    command += ["--device", resources.device, "--parallel", resources.parallel]
    command += ["--threads", str(resources.threads)]
    command += [WATCH_FLAG, "remove" if temporary else "keep"]
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(resources.threads)), "HF_HUB_OFFLINE": "1"}
    if why_not_cpp() is not None:
        # Kernels that somebody builds meanwhile must not change what later trials run.
        environment["GEONORM_CPP"] = "0"
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Nothing is ever written to it. The system closes it when this process ends in whatever way, SIGKILL included.
        stdin=subprocess.PIPE,
        env=environment,
    )
    return TrialProcess(trial, folder=folder, process=process, log=log, temporary=temporary)


def end_with_parent(remove: Path | None = None) -> None:
    """End this process as soon as its standard input is closed, which happens when its starter ends in any way.

    ``remove`` names a folder that nobody else will then remove.

    Unlike a signal on the parent's death it works on every system, and through a launcher in between.
    """

    def watch() -> None:
        # The raw descriptor: a thread that waits in sys.stdin would hold its lock when the interpreter shuts down.
        while os.read(0, 1024):
            pass
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
