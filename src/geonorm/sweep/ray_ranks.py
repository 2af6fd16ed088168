"""A trial on a Ray cluster: a task a rank, in one placement group where there are several.

The task of rank 0 starts those of the others, speaks for all of them and ends with the first that fails. Ray starts it
again, and so all of them, if a process or a worker was lost.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

from geonorm.errors import UserError, first_line
from geonorm.provenance import code_version
from geonorm.signals import TRY_AGAIN
from geonorm.sweep.executors import Resources, TrialProcess, spec_path

CANCEL_SECONDS = 30
_POLL_SECONDS = 0.3
# Ray counts in such parts.
_PARTS = 10_000
REMEDY = "put `out` and the corpus (GEONORM_CACHE) on storage that all machines share"


class TrialKilledError(Exception):
    """A process of a trial was killed or asked to end; the next attempt may have more luck."""


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Which cluster, and what each trial gets of it.

    Attributes:
        address: ``host:port`` of a running cluster or ``"auto"``; None starts one on this machine.
        cpus: CPUs a trial; gpus: GPUs a trial, below 1 several trials share one. Several ranks divide both.
        ranks: processes that train a trial together, on as few machines as hold them.
        retries: times that a trial goes on elsewhere after a process or a worker was lost.
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
        """What each process of a trial may use."""
        return Resources(max(1, self.cpus // self.ranks), self.ranks, self.step_impl)

    @property
    def bundle(self) -> dict[str, float]:
        """What each rank takes of the cluster."""
        return {"CPU": int(self.cpus / self.ranks * _PARTS) / _PARTS, "GPU": self.gpus / self.ranks}


def start_rank(
    options: RayOptions, code: str, folder: str, group: Any = None, rank: int = 0, main: str = "", **more: Any
) -> Any:
    """Start the task of a rank, see :func:`run_rank`; returns Ray's reference.

    Args:
        group: placement group with a bundle a rank; None for a trial of one rank.
        more: options of the task.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Within

    # Travels by value, as all local functions: a machine with no geonorm or another one gets as far as saying so.
    def run(given: dict[str, Any], *rest: Any) -> str:
        from geonorm.sweep.ray_ranks import RayOptions, run_rank

        return run_rank(RayOptions(**given), *rest)

    task: Any = ray.remote(run).options(
        num_cpus=options.bundle["CPU"],
        num_gpus=options.bundle["GPU"],
        scheduling_strategy="DEFAULT" if group is None else Within(group, placement_group_bundle_index=rank),
        retry_exceptions=[TrialKilledError],
        **more,
    )
    return task.remote(dataclasses.asdict(options), code, folder, rank, main)


def run_rank(options: RayOptions, code: str, folder: str, rank: int, main: str) -> str:
    """Run a rank of a trial on this machine of the cluster, and on rank 0 have the others run; waits for it.

    Args:
        options: of the cluster.
        code: version of the code that the driver runs.
        folder: of the trial.
        rank: number of this one.
        main: ``host:port`` where the ranks meet; rank 0 decides it.

    Returns:
        Why it left no result, or "".

    Raises:
        UserError: this machine, which may have joined late, has other code than the driver or does not see the folder.
        TrialKilledError: no rank failed by itself, but a process or a worker was lost.
    """
    import ray

    name = f"machine {socket.gethostname()} of the Ray cluster"
    if code_version() != code:
        raise UserError(f"{name} runs geonorm {code_version()}, the driver {code}; install the same on every machine")
    if not spec_path(Path(folder)).exists():
        raise UserError(f"{name} does not see {folder}; {REMEDY}")
    others = []
    if options.ranks > 1 and not rank:
        main, group = f"{ray.util.get_node_ip_address()}:{_free_port()}", ray.util.get_current_placement_group()
        others = [start_rank(options, code, folder, group, i, main, max_retries=0) for i in range(1, options.ranks)]
    process = TrialProcess(Path(folder), options.resources, rank, main)
    try:
        while process.failure() is None and not any(outcome(other)[0] for other in others):
            time.sleep(_POLL_SECONDS)
        if others:
            # The rank that failed says why, and the rest notice it.
            ray.wait(others, num_returns=len(others), timeout=CANCEL_SECONDS)
    finally:
        for other in others:
            ray.cancel(other)
        if process.process.poll() is None:
            process.ask_to_end()
            process.end()
    status = process.process.returncode
    outcomes = [(process.failure(), status < 0 or status == TRY_AGAIN), *map(outcome, others)]
    failures = [(lost, failure) for failure, lost in outcomes if failure]
    # Ranks that lost another one follow the one that failed by itself.
    lost, failure = min(failures, key=lambda failed: failed[0], default=(False, ""))
    if lost:
        raise TrialKilledError(failure)
    return failure


def outcome(reference: Any) -> tuple[str | None, bool]:
    """Why a task left no result, as ``Handle.failure`` says it, and whether that is because something was lost."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    if not ray.wait([reference], timeout=0)[0]:
        return None, False
    try:
        return ray.get(reference), False
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        if isinstance(error.cause, TrialKilledError):
            return str(error.cause), True
        return f"{type(error.cause).__name__} in the task: {first_line(error.cause)}", False
    except RayError as error:
        return f"the worker was lost ({type(error).__name__})", True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
