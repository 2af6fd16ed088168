"""A run that is killed again and again ends as one that is not: ``python -m benchmarks.soak --kills 20``.

One run goes to its end undisturbed. Another one is killed (SIGKILL) at random instants, every other time while a
checkpoint is being written, and started again with ``--resume`` each time. Weights, moments, random streams, counters
and metrics of the two must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from geonorm import cli
from geonorm.training import run as _  # noqa: F401  (imported before the forks, not after each)
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.distributed import solo
from geonorm.training.manifest import verify

RECIPE = """\
model: {width: 32, depth: 2, heads: 2, options: {learnable: true}}
data: {vocab_size: 257, length: 32}
optimizer: {lr: 4e-3}
evaluation: {every: 50, windows: 16, layers_every: 50, log_every: 1}
checkpoint: {every: 5}
sampling: {every: 50, tokens: 8}
batch: 4
accumulation: 2
"""
RESULTS = Path(__file__).parent / "results" / "soak.json"
CLOCK = ("seconds", "step_seconds", "tokens_per_second", "mfu", "peak_memory_bytes")


class Run:
    """``geonorm train`` in a process of its own, forked so that nothing is imported anew."""

    def __init__(self, recipe: Path, data: Path, out: Path, steps: int) -> None:
        words = ["--config", str(recipe), "--out", str(out), "--resume", f"data.sources=[{data}]", f"steps={steps}"]
        self.log = out.parent / f"{out.name}.log"
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                code = cli.main(["train", *words])
                sys.stdout.flush()
            finally:
                os._exit(code)

    def ended(self, wait: bool = False) -> bool:
        """Whether the process has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.ended(wait=True)

    def is_training(self) -> bool:
        """Whether a step has been reported since the start."""
        if not self.log.exists():
            return False
        with self.log.open("rb") as file:
            file.seek(self.begin)
            return b"\nstep " in b"\n" + file.read()


def kill_while_saving(run: Run, checkpoints: Path, chooser: random.Random) -> bool:
    """Kill once a checkpoint has begun; false if the run ended before."""
    saves = chooser.randint(1, 6)
    seen: set[str] = set()
    while not run.ended():
        names = {path.name for path in checkpoints.glob(".partial-*")} if checkpoints.exists() else set()
        seen |= names
        if names and len(seen) >= saves:
            time.sleep(chooser.choice([0, 0, chooser.uniform(0, 0.02)]))
            run.kill()
            return True
    return False


def kill_at_random(run: Run, chooser: random.Random) -> bool:
    """Kill while it starts, or within two seconds of training; false if the run ended before."""
    starting = chooser.random() < 0.2
    while not (starting or run.is_training() or run.ended()):
        time.sleep(0.01)
    until = time.monotonic() + chooser.uniform(0, 2)
    while time.monotonic() < until and not run.ended():
        time.sleep(0.01)
    if run.ended():
        return False
    run.kill()
    return True


def finish(recipe: Path, data: Path, out: Path, steps: int) -> None:
    run = Run(recipe, data, out, steps)
    run.ended(wait=True)
    if run.code != 0:
        raise SystemExit(f"the run ended with {run.code}: {run.log.read_text(encoding='utf-8')[-2000:]}")


def content(out: Path, step: int) -> dict[str, Any]:
    """Everything of a finished run but times."""
    saved = verify(out / "checkpoints" / f"step-{step}")
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in saved.shapes.items()}
    Checkpoints(out / "checkpoints", solo(torch.device("cpu"))).load(saved, tensors)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]
    return {"tensors": tensors, "progress": {**saved.facts["progress"], "seconds": 0}, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "math.md")
    parser.add_argument("--write", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chooser = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        begin = time.monotonic()
        finish(recipe, options.data, folder / "straight", options.steps)
        straight_seconds = time.monotonic() - begin
        counts = {"random": 0, "saving": 0, "partial left": 0}
        while counts["random"] + counts["saving"] < options.kills:
            saving = counts["saving"] <= counts["random"]
            run = Run(recipe, options.data, folder / "killed", options.steps)
            checkpoints = folder / "killed" / "checkpoints"
            killed = kill_while_saving(run, checkpoints, chooser) if saving else kill_at_random(run, chooser)
            if not killed:
                break
            counts["saving" if saving else "random"] += 1
            counts["partial left"] += any(checkpoints.glob(".partial-*")) if checkpoints.exists() else 0
            print(f"killed {counts}", flush=True)
        finish(recipe, options.data, folder / "killed", options.steps)
        mine, theirs = (content(folder / name, options.steps) for name in ("killed", "straight"))
        log = (folder / "killed.log").read_text(encoding="utf-8")
        equal = {
            "tensors": mine["tensors"].keys() == theirs["tensors"].keys()
            and all(torch.equal(value, theirs["tensors"][name]) for name, value in mine["tensors"].items()),
            "progress": mine["progress"] == theirs["progress"],
            "rows": mine["rows"] == theirs["rows"],
        }
    figures = {
        "command": "python -m benchmarks.soak " + " ".join(sys.argv[1:]),
        "steps": options.steps,
        "kills": counts,
        "resumed": log.count("going on from step"),
        "rejected": log.count("not used:"),
        "tensors": len(mine["tensors"]),
        "rows": len(mine["rows"]),
        "straight_seconds": round(straight_seconds, 1),
        "equal": equal,
    }
    print(json.dumps(figures, indent=1))
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    whole = counts["random"] + counts["saving"] == options.kills
    return 0 if all(equal.values()) and whole else 1


if __name__ == "__main__":
    sys.exit(main())
