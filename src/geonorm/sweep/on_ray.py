"""Runs trials as tasks of a Ray cluster, which places them and starts those anew whose machine was lost.

Every machine sees the folder of the comparison and the corpus (NFS and the like), so a trial that is started anew goes
on from its last checkpoint. The only file that imports Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from geonorm.errors import UserError, first_line
from geonorm.provenance import code_version
from geonorm.sweep.executors import Executor, Handle, Resources, TrialProcess, spec_path
from geonorm.sweep.machines import describe_machine, difference

_ANSWER_SECONDS, _DESCRIBE_SECONDS, _CANCEL_SECONDS, _POLL_SECONDS = 10, 300, 30, 0.3


class TrialKilledError(Exception):
    """The process of a trial was killed; another machine may have more luck."""


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Which cluster, and what each trial gets of it.

    Attributes:
        address: ``host:port`` of a running cluster or ``"auto"``; None starts one on this machine.
        cpus: CPUs a trial; with several ranks they are divided among them.
        gpus: GPUs a trial; below 1 several trials share one.
        ranks: processes that train a trial together, on one machine.
        retries: times that a trial goes on elsewhere after its worker was lost.
        step_impl: see :class:`Resources`.
    """

    address: str | None = None
    cpus: int = 1
    gpus: float = 0
    ranks: int = 1
    retries: int = 2
    step_impl: str | None = None

    @property
    def resources(self) -> Resources:
        """What a trial's process may use."""
        return Resources(max(1, self.cpus // self.ranks), self.ranks, self.step_impl)


class RayExecutor(Executor):
    """Runs each trial as a Ray task with CPUs or GPUs of its own; see :class:`Executor`.

    Args:
        options: of the cluster and of each trial.
        jobs: most trials at a time; None for as many as the cluster takes.
        seen: files that every machine has to see.
        on_note: is given a line for the user now and then.
        callbacks: see :class:`Executor`.

    Raises:
        UserError: on entry: ray is not installed, no cluster answers, no machine of this one is large enough, or a
            machine runs other code than this one or does not see the files.
    """

    def __init__(
        self,
        options: RayOptions,
        jobs: int | None,
        seen: Iterable[Path],
        on_note: Callable[[str], None] = lambda text: None,
        **callbacks: Any,
    ) -> None:
        super().__init__(jobs or 10**9, options.resources, **callbacks)
        self.options, self.seen, self.on_note = options, [str(path) for path in seen], on_note
        self.machines: list[dict[str, Any]] = []
        self.ray: Any = None
        self.is_ours = False

    def __enter__(self) -> RayExecutor:
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_ours:
            self.is_ours = False
            self.ray.shutdown()

    def environment(self) -> dict[str, Any]:
        """See :meth:`Executor.environment`."""
        known = {name: sorted({m[name] for m in self.machines if m.get(name)}) for name in ("processor", "accelerator")}
        return {
            "executor": f"ray {metadata.version('ray')}",
            "machines": len(self.machines),
            **{name: ", ".join(values) for name, values in known.items() if values},
            "threads_per_trial": self.resources.threads * self.resources.ranks,
        }

    def start(self, folder: Path) -> Handle:
        """See :meth:`Executor.start`."""
        task = self.ray.remote(_remote_functions()[1]).options(
            name=folder.name,
            num_cpus=self.options.cpus,
            num_gpus=self.options.gpus,
            max_retries=self.options.retries,
            retry_exceptions=[TrialKilledError],
        )
        return _Task(self.ray, task.remote(code_version(), str(folder), dataclasses.asdict(self.resources)))

    def _connect(self) -> None:
        # Before the import, which reads it: nothing is reported to anyone.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UserError("ray is not installed; run pip install 'geonorm[ray]'") from None
        self.ray = ray
        if not ray.is_initialized():
            before = signal.getsignal(signal.SIGTERM)
            self._init()
            self.is_ours = True
            # Ray would end this process at once; trials are to be ended first, and the remedy said.
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        needs = {"CPU": self.options.cpus, "GPU": self.options.gpus}
        able = [node for node in nodes if all(node["Resources"].get(name, 0) >= need for name, need in needs.items())]
        if not able:
            gpus = f" and {self.options.gpus:g} GPUs" if self.options.gpus else ""
            problem = f"no machine of the Ray cluster has {self.options.cpus} CPUs{gpus} for a trial"
            if self.options.address is None:
                raise UserError(f"{problem}; lower --cpus-per-trial or --gpus-per-trial")
            self.on_note(f"{problem} now; waiting for one to join")
        self._describe(able)

    def _init(self) -> None:
        address = self.options.address
        if address is not None and address.startswith("ray://"):
            raise UserError(
                f"`address` {address} is for Ray Client; run the command on a machine of the cluster with --address"
                " auto, or through `ray job submit`"
            )
        if address not in (None, "auto"):
            _check_answers(str(address))
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is None:
                gpus = {} if self.options.gpus else {"num_gpus": 0}
                self.ray.init("local", include_dashboard=False, **gpus, **quiet)
            else:
                self.ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            where = "no Ray cluster started" if address is None else f"no Ray cluster answers at `address` {address}"
            raise UserError(f"{where} ({first_line(error)}); see docs/cluster.md") from error

    def _describe(self, nodes: list[dict[str, Any]]) -> None:
        """Check that every machine that can run a trial runs the same code as this one and sees its files."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        describe = self.ray.remote(_remote_functions()[0])
        asked = [
            describe.options(num_cpus=0, max_retries=2, scheduling_strategy=On(node["NodeID"], soft=False)).remote(
                self.seen
            )
            for node in nodes
        ]
        for node, answer in zip(nodes, asked, strict=True):
            name = f"machine {node['NodeManagerHostname']} ({node['NodeManagerAddress']}) of the Ray cluster"
            try:
                machine = self.ray.get(answer, timeout=_DESCRIBE_SECONDS)
            except self.ray.exceptions.RayError as error:
                raise UserError(f"{name} does not answer: {first_line(error)}") from error
            if problem := difference(machine["versions"], describe_machine()["versions"]):
                raise UserError(f"{name} {problem}; install the same on every machine")
            if machine["unseen"]:
                raise UserError(f"{name} does not see {machine['unseen'][0]}; {_REMEDY}")
            self.machines.append(machine)


_REMEDY = "put `out` and the corpus (GEONORM_CACHE) on storage that all machines share"


class _Task:
    """A trial as a Ray task; see :class:`geonorm.sweep.executors.Handle`."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def failure(self) -> str | None:
        if not self.ray.wait([self.reference], timeout=0)[0]:
            return None
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            if isinstance(error.cause, TrialKilledError):
                return str(error.cause)
            return f"{type(error.cause).__name__} in the task: {first_line(error.cause)}"
        except self.ray.exceptions.RayError as error:
            return f"the worker was lost ({type(error).__name__})"

    def ask_to_end(self) -> None:
        # A cluster that is gone has no tasks left, and the reason to end is told already.
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.cancel(self.reference)

    def end(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.wait([self.reference], timeout=_CANCEL_SECONDS)


def run_here(code: str, folder: str, resources: Resources) -> str:
    """Run a trial on this machine of the cluster, and wait for it; returns why it left no result, or "".

    Raises:
        UserError: this machine, which may have joined late, has other code than the driver or does not see the folder.
        TrialKilledError: its process was killed.
    """
    name = f"machine {socket.gethostname()} of the Ray cluster"
    if code_version() != code:
        raise UserError(f"{name} runs geonorm {code_version()}, the driver {code}; install the same on every machine")
    if not spec_path(Path(folder)).exists():
        raise UserError(f"{name} does not see {folder}; {_REMEDY}")
    process = TrialProcess(Path(folder), resources)
    try:
        while (failure := process.failure()) is None:
            time.sleep(_POLL_SECONDS)
    finally:
        if process.process.poll() is None:
            process.ask_to_end()
            process.end()
    if process.process.returncode < 0:
        raise TrialKilledError(failure)
    return failure


def _remote_functions() -> tuple[Callable[..., dict[str, Any]], Callable[..., str]]:
    # Local functions travel by value: on a machine with no geonorm or another one they get as far as saying so.
    def describe(seen: list[str]) -> dict[str, Any]:
        import os

        unseen = [path for path in seen if not os.path.exists(path)]
        try:
            from geonorm.sweep.machines import describe_machine
        except ImportError:
            return {"versions": None, "unseen": unseen}
        return {**describe_machine(), "unseen": unseen}

    def trial(code: str, folder: str, resources: dict[str, Any]) -> str:
        from geonorm.sweep.executors import Resources
        from geonorm.sweep.on_ray import run_here

        return run_here(code, folder, Resources(**resources))

    return describe, trial


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"`address` must be HOST:PORT or auto, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at `address` {address} ({error.strerror or error}); see docs/cluster.md"
        ) from None
