"""Everything that geonorm asks of Ray. The only file that imports it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

from geonorm.errors import UserError
from geonorm.experiments.corpus_transfer import CorpusOffer
from geonorm.experiments.environment import code_version, describe_machine
from geonorm.experiments.process import Resources
from geonorm.experiments.trials import Trial

_ANSWER_SECONDS = 10
_DESCRIBE_SECONDS = 300
_CANCEL_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Which cluster, and what each trial gets of it.

    Attributes:
        address: ``host:port`` of a running cluster or ``"auto"``; None starts one on this machine.
        cpus: CPUs a trial; with several ranks they are divided among them.
        gpus: GPUs a trial; below 1 several trials share one.
        ranks: processes that train a trial together; parallel: how they share the model, ``"ddp"`` or ``"fsdp"``.
        retries: times that a trial starts anew after its worker was lost.
    """

    address: str | None = None
    cpus: int = 1
    gpus: float = 0
    ranks: int = 1
    parallel: str = "ddp"
    retries: int = 2

    @property
    def resources(self) -> Resources:
        """What a trial's process may use."""
        parallel = self.parallel if self.ranks > 1 else "none"
        return Resources(max(1, self.cpus // self.ranks), "cuda" if self.gpus else "cpu", self.ranks, parallel)

    @property
    def needs(self) -> str:
        """CPUs and GPUs of a trial, in words."""
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus} CPU{'s' * (self.cpus > 1)}{gpus}"


class Cluster:
    """A connection to a Ray cluster."""

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.machines: list[dict[str, Any]] = []
        self._ray: Any = None
        self._ours = False
        self._task: Any = None

    def connect(self, note: Callable[[str], None]) -> None:
        """Connect, and check that every machine that can run a trial runs the same code as this one.

        Raises:
            UserError: ray is not installed, no cluster answers, no machine of this one is large enough, or the code
                differs.
        """
        # Before the import, which reads it: nothing is reported to anyone.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UserError("ray is not installed; run pip install 'geonorm[ray]'") from None
        self._ray = ray
        if not ray.is_initialized():
            before = signal.getsignal(signal.SIGTERM)
            self._init()
            self._ours = True
            # Ray would end this process at once; trials are to be ended first, and the remedy said.
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        describe, trial = _remote_functions()
        self._task = ray.remote(trial).options(
            num_cpus=self.options.cpus, num_gpus=self.options.gpus, max_retries=0, num_returns="streaming"
        )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        able = [node for node in nodes if self._fits(node["Resources"])]
        if not able:
            problem = f"no machine of the Ray cluster has {self.options.needs} for a trial"
            if self.options.address is None:
                raise UserError(f"{problem}; lower --cpus-per-trial or --gpus-per-trial")
            note(f"{problem} now; waiting for one to join")
        self._describe(describe, able)

    def disconnect(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._ours:
            self._ours = False
            self._ray.shutdown()

    def environment(self) -> dict[str, Any]:
        """The machines, for the results."""
        names = ("processor", "accelerator")
        known = {name: sorted({m[name] for m in self.machines if m.get(name)}) for name in names}
        return {
            "executor": f"ray {metadata.version('ray')}",
            "machines": len(self.machines),
            **{name: ", ".join(values) for name, values in known.items() if values},
            "threads_per_trial": self.options.resources.threads * self.options.ranks,
        }

    def submit(self, trial: Trial, offer: CorpusOffer) -> Any:
        """Queue a trial; returns the stream of its events."""
        # Plain data, because a class of geonorm's could not even be unpacked where geonorm is missing.
        offered = (offer.path, offer.key, offer.pieces)
        return self._task.remote(code_version(), trial.to_json(), offered, dataclasses.asdict(self.options.resources))

    def put(self, content: bytes) -> Any:
        """Keep bytes in the cluster; returns a reference."""
        return self._ray.put(content)

    def ready(self, streams: Iterable[Any], seconds: float) -> list[Any]:
        """Streams whose next event is there, after ``seconds`` at most."""
        streams = list(streams)
        return (
            self._ray.wait(streams, num_returns=len(streams), timeout=0)[0]
            or (self._ray.wait(streams, num_returns=1, timeout=seconds)[0])
        )

    def next(self, stream: Any) -> dict[str, Any] | None:
        """The next event of a stream, None at its end; kind ``"lost"`` where its worker or machine was lost."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(next(stream))
        except StopIteration:
            return None
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                return {"kind": "refused", "message": str(cause)}
            return {"kind": "lost", "reason": f"{type(cause).__name__} in the task: {_first_line(cause)}"}
        except exceptions.RayError as error:
            return {"kind": "lost", "reason": f"the worker was lost ({type(error).__name__})"}

    def cancel(self, streams: Iterable[Any]) -> None:
        """Ask tasks to end, and wait a little until they have put their things away."""
        left = list(streams)
        end = time.monotonic() + _CANCEL_SECONDS
        # A cluster that is gone has no tasks left, and the reason to end is told already.
        with contextlib.suppress(self._ray.exceptions.RayError):
            for stream in left:
                self._ray.cancel(stream)
            while left and time.monotonic() < end:
                for stream in self.ready(left, 0.3):
                    if self.next(stream) is None:
                        left.remove(stream)

    def _init(self) -> None:
        address = self.options.address
        if address is not None and address.startswith("ray://"):
            raise UserError(
                f"`address` {address} is for Ray Client, through which trials cannot report; run the command on a "
                "machine of the cluster with --address auto, or through `ray job submit`"
            )
        if address not in (None, "auto"):
            _check_answers(str(address))
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is None:
                gpus = {} if self.options.gpus else {"num_gpus": 0}
                self._ray.init("local", include_dashboard=False, **gpus, **quiet)
            else:
                self._ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            where = "no Ray cluster started" if address is None else f"no Ray cluster answers at `address` {address}"
            raise UserError(f"{where} ({_first_line(error)}); see docs/cluster.md") from error

    def _fits(self, resources: dict[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.options.cpus and resources.get("GPU", 0) >= self.options.gpus

    def _describe(self, describe: Callable[[], dict[str, Any]], nodes: list[dict[str, Any]]) -> None:
        """Ask machines what they are."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(describe)
        asked = [
            remote.options(
                num_cpus=0,
                max_retries=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote()
            for node in nodes
        ]
        for node, answer in zip(nodes, asked, strict=True):
            name = f"machine {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            try:
                machine = self._ray.get(answer, timeout=_DESCRIBE_SECONDS)
            except self._ray.exceptions.RayError as error:
                raise UserError(f"{name} of the Ray cluster does not answer: {_first_line(error)}") from error
            if problem := difference(machine["versions"], describe_machine()["versions"]):
                raise UserError(f"{name} of the Ray cluster {problem}; install the same on every machine")
            self.machines.append(machine)


def difference(theirs: dict[str, str] | None, mine: dict[str, str]) -> str:
    """What is wrong with a machine's versions, in words; empty if nothing is.

    Builds of one version, such as torch for CPU and for CUDA, count as the same.
    """
    if theirs is None:
        return "has no geonorm, or one without `--executor ray`"
    for name, version in mine.items():
        other = theirs.get(name)
        exact = name == "geonorm"
        if other != version and (exact or str(other).partition("+")[0] != version.partition("+")[0]):
            return f"runs {name} {other}, this one {version}"
    return ""


def _remote_functions() -> tuple[Callable[[], dict[str, Any]], Callable[..., Iterator[dict[str, Any]]]]:
    # Local functions travel by value: on a machine with no geonorm or another one they get as far as saying so.
    def describe() -> dict[str, Any]:
        try:
            from geonorm.experiments.environment import describe_machine
        except ImportError:
            return {"versions": None}
        return describe_machine()

    def trial(code: str, *arguments: Any) -> Iterator[dict[str, Any]]:
        import ray

        run: Callable[..., Iterator[dict[str, Any]]] | None = None
        found = "none, or one without `--executor ray`"
        try:
            from geonorm.experiments.environment import code_version
            from geonorm.experiments.remote_task import run_remotely as run

            found = code_version()
        except ImportError:
            pass
        if run is None or found != code:
            where = ray.util.get_node_ip_address()
            text = f"machine {where} of the Ray cluster runs geonorm {found}, this one {code}; install the same on both"
            yield {"kind": "refused", "message": text}
            return
        yield from run(*arguments, ray.get)

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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
