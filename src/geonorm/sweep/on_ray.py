"""Runs trials on a Ray cluster, which places them and starts those anew whose machine was lost.

Every machine sees the folder of the comparison and the corpus (NFS and the like), so a trial that is started anew goes
on from its last checkpoint. Only this file and `ray_ranks` import Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from geonorm.errors import UserError, first_line
from geonorm.provenance import code_version
from geonorm.sweep.executors import Executor, Handle
from geonorm.sweep.machines import describe_machine, difference
from geonorm.sweep.ray_ranks import CANCEL_SECONDS, REMEDY, RayOptions, outcome, start_rank

_ANSWER_SECONDS, _DESCRIBE_SECONDS = 10, 300


class RayExecutor(Executor):
    """Runs each trial with CPUs or GPUs of its own, on any machine; see :class:`Executor`.

    Args:
        options: of the cluster and of each trial.
        jobs: most trials at a time; None for as many as the cluster takes.
        seen: files that every machine has to see.
        on_note: is given a line for the user now and then.
        callbacks: see :class:`Executor`.

    Raises:
        UserError: on entry: ray is not installed, no cluster answers, this machine's own is too small, or a machine
            runs other code than this one or does not see the files.
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
        self.closing = contextlib.ExitStack()

    def __enter__(self) -> RayExecutor:
        with self.closing:
            self._connect()
            self.closing = self.closing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()

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
        options, group = self.options, None
        if options.ranks > 1:
            group = self.ray.util.placement_group([options.bundle] * options.ranks, strategy="PACK")
        more = {"max_retries": options.retries, "name": folder.name}
        return _Task(start_rank(options, code_version(), str(folder), group, **more), group)

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
            self.closing.callback(ray.shutdown)
            # Ray would end this process at once; trials are to be ended first, and the remedy said.
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        nodes, bundle = [node for node in ray.nodes() if node["Alive"]], self.options.bundle
        needs = {name: need for name, need in bundle.items() if need}
        room = [min(int(node["Resources"].get(name, 0) / need) for name, need in needs.items()) for node in nodes]
        if sum(room) < self.options.ranks:
            what = f"{bundle['CPU']:g} CPUs" + (f" and {bundle['GPU']:g} GPUs" if bundle["GPU"] else "")
            problem = f"no machine of the Ray cluster has {what} for a trial"
            if self.options.ranks > 1:
                problem = f"the Ray cluster has room for {sum(room)} of {self.options.ranks} ranks with {what} each"
            if self.options.address is None:
                raise UserError(f"{problem}; lower --cpus-per-trial or --gpus-per-trial")
            self.on_note(f"{problem} now; waiting for machines to join")
        self._describe([node for node, ranks in zip(nodes, room, strict=True) if ranks])

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

        # Travels by value, as all local functions: a machine with no geonorm or another one gets as far as saying so.
        def describe(seen: list[str]) -> dict[str, Any]:
            import os

            unseen = [path for path in seen if not os.path.exists(path)]
            try:
                from geonorm.sweep.machines import describe_machine
            except ImportError:
                return {"versions": None, "unseen": unseen}
            return {**describe_machine(), "unseen": unseen}

        task = self.ray.remote(describe)
        asked = [
            task.options(num_cpus=0, max_retries=2, scheduling_strategy=On(node["NodeID"], soft=False)).remote(
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
                raise UserError(f"{name} does not see {machine['unseen'][0]}; {REMEDY}")
            self.machines.append(machine)


class _Task:
    """A trial as a Ray task; see :class:`geonorm.sweep.executors.Handle`."""

    def __init__(self, reference: Any, group: Any) -> None:
        import ray

        self.ray, self.reference, self.group = ray, reference, group

    def failure(self) -> str | None:
        failure, _ = outcome(self.reference)
        if failure is not None:
            self._free()
        return failure

    def ask_to_end(self) -> None:
        # A cluster that is gone has no tasks left, and the reason to end is told already.
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.cancel(self.reference)

    def end(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.wait([self.reference], timeout=CANCEL_SECONDS)
            self._free()

    def _free(self) -> None:
        if self.group is not None:
            self.ray.util.remove_placement_group(self.group)
            self.group = None


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
