"""A trial: one training run of a comparison, in a folder and a process of its own.

A process a trial keeps trials apart: one that dies takes no other with it, its memory is its own, and its threads are
set before torch starts. Run as ``python -m geonorm.sweep.trial SPEC FOLDER``; a trial that was begun goes on from its
last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from geonorm.errors import UserError
from geonorm.placements import create
from geonorm.report.results import Trial as TrialResult
from geonorm.training import recipe
from geonorm.training.config import RunConfig
from geonorm.training.folder import CONFIG, RESULT, RUN
from geonorm.training.result import RunResult

_LONGEST = 150
ENDED = ("ok", "diverged", "unlearned")
# What changes no result, or is decided anew where a trial runs.
_FREE = ("data.corpus", "data.sources", "checkpoint.", "tracking.", "sampling.", "device", "parallel", "peak_flops")


@dataclasses.dataclass(frozen=True)
class Trial:
    """Everything that decides a trial's result.

    Attributes:
        variant: name of its variant, see `geonorm.report.results.Variant`.
        config: of the run, with the placement, the learning rate and the seed.
        corpus: identity of the corpus.
    """

    variant: str
    config: RunConfig
    corpus: str

    @property
    def label(self) -> str:
        """Name of the placement with its unusual options, the same for every learning rate and seed."""
        return create(self.config.model.placement or "", **self.config.model.options).label()

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.config.optimizer.lr

    @property
    def seed(self) -> int:
        """Seed of weights and data order."""
        return self.config.seed

    @property
    def id(self) -> str:
        """Name of the trial's folder."""
        names = [re.sub(r"[^A-Za-z0-9.=_]+", "-", name).strip("-") for name in (self.variant, self.label)]
        name = "-".join(filter(None, names))
        if len(name) > _LONGEST:
            # File systems take no more than 255 bytes of a name.
            name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return f"{name}-lr{self.lr!r}-seed{self.seed}"

    def result(self, ended: RunResult) -> TrialResult:
        """The result of the run as one of this trial."""
        placement = create(self.config.model.placement or "", **self.config.model.options)
        return TrialResult(
            **dataclasses.asdict(ended),
            id=self.id,
            variant=self.variant,
            label=self.label,
            placement=placement.name,
            options=placement.changed_options(),
            seed=self.seed,
            lr=self.lr,
        )

    def read_result(self, folder: Path) -> TrialResult | None:
        """The result that a finished run left in a folder; None if there is none.

        Raises:
            UserError: the folder holds the result of a trial that is not exactly this one.
        """
        try:
            found = recipe.build(RunResult, _object(folder / RESULT), ignore_unknown=True)
        except (OSError, ValueError):
            return None
        if found.status not in ENDED:
            return None
        try:
            saved = recipe.load([folder / CONFIG])
            same = _object(folder / RUN).get("corpus") == self.corpus and _decisive(saved) == _decisive(self.config)
        except (OSError, ValueError):
            same = False
        if not same:
            raise UserError(f"{folder} holds the result of a trial with other settings or defaults; name another `out`")
        return self.result(found)


def _object(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no object")
    return data


def _decisive(config: RunConfig) -> dict[str, Any]:
    flat = recipe.flat(recipe.resolved(config))
    return {key: value for key, value in flat.items() if not key.startswith(_FREE)}


def end_with_parent() -> None:
    """End this process as soon as its standard input is closed, which happens when its starter ends in any way.

    Unlike a signal on the parent's death it works on every system, and through a launcher in between.
    """

    def watch() -> None:
        # The raw descriptor: a thread that waits in sys.stdin would hold its lock when the interpreter shuts down.
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main(words: list[str]) -> int:
    """Entry of the process; the last line it prints says why it failed."""
    parser = argparse.ArgumentParser(description="Run one trial.")
    parser.add_argument("spec", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--end-with-parent", action="store_true", help="end when standard input is closed")
    parser.add_argument("--kernels", action="store_true", help="build the C++ kernels of the step where they are not")
    arguments = parser.parse_args(words)
    if arguments.end_with_parent:
        end_with_parent()
    import torch

    from geonorm.ops import ensure_cpu_kernels
    from geonorm.training.run import run

    torch.set_num_threads(arguments.threads)
    if arguments.kernels and ensure_cpu_kernels(wait=True) != "cpp":
        print("error: the other trials have the C++ kernels of the step, which this machine cannot build")
        return 2
    try:
        return run(recipe.load([arguments.spec]).filled(), arguments.folder, resume=True)
    except UserError as error:
        print(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
