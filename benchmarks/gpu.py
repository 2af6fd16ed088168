"""Everything that a machine with a GPU is needed for, within eight minutes: ``python -m benchmarks.gpu``.

Correctness of the kernels, then the step against copying, the training step, memory, and peers, most wanted first. Each
runs in a process of its own with its share of the time: what crashes or hangs costs no other its results, which are
written as they come. ``--device cpu --quick`` tries the whole script on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, Settings, command_line, fill, header, report

# Share of the time that is left when the part starts.
PARTS = {"kernels": 0.25, "step": 0.4, "training_step": 0.6, "memory": 0.3, "peers": 1.0}
# Imports, a compilation that had begun, writing: a part that was told to stop gets so many seconds more.
GRACE = 20.0


@dataclasses.dataclass(frozen=True)
class GpuSettings(Settings):
    """All benchmarks on one GPU."""

    device: str = "cuda"
    """cuda; or cpu, with --quick, to try the script."""
    seconds: float | None = 460.0
    """Time for everything."""


PRESETS: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {}, "quick": {}}


def run_part(name: str, settings: GpuSettings, folder: Path, budget: Budget) -> dict[str, Any]:
    """Run one benchmark; returns its result, or how it failed."""
    allowed = max(1.0, (budget.part(PARTS[name]) or 3600.0) - GRACE)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--device", settings.device, "--seconds", f"{allowed:.0f}"]
    command += ["--out", str(folder)] + (["--quick"] if settings.quick else [])
    command += [] if settings.rounds is None else ["--rounds", str(settings.rounds)]
    print(f"{name}: up to {allowed:.0f} s", flush=True)
    own = Budget(None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=allowed + GRACE, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {allowed + GRACE:.0f} s"}
    print(done.stdout, flush=True)
    written = list(folder.glob(f"{name}*.json"))
    result = json.loads(written[0].read_text(encoding="utf-8")) if written else {}
    if done.returncode != 0:
        result["failed"] = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    return {**result, "wall_seconds": own.used}


def run(settings: GpuSettings) -> dict[str, Any]:
    """Every part in turn; returns the result, which is written after each."""
    settings = fill(settings, PRESETS)
    budget, result = Budget(settings.seconds), header("gpu", settings)
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PARTS:
            parts[name] = run_part(name, settings, Path(folder), budget)
            result |= {"parts": parts, "seconds": budget.used}
            summary = [{"part": key, "seconds": part.get("wall_seconds"), "failed": part.get("failed")}
                       for key, part in parts.items()]  # fmt: skip
            report("gpu", settings, result, {"Parts": summary})
    if any("failed" in part for part in parts.values()):
        raise SystemExit(1)
    return result


if __name__ == "__main__":
    command_line(GpuSettings, run, __doc__)
