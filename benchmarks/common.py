"""What every benchmark shares: turns within a round, medians and quartiles, the machine, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro

import geonorm
from geonorm.errors import UserError

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("x-transformers", "nGPT-pytorch", "geoopt", "liger-kernel", "triton")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEWEST_ROUNDS = 3
# Work queued behind a sleeping GPU starts without gaps, so that the time is the device's and not Python's.
SLEEP_CYCLES = 4_000_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of every benchmark. What is left out comes from the device's preset, or from a tiny one with --quick."""

    device: str = "cpu"
    """cpu or cuda."""
    quick: bool = False
    """Tiny sizes, to see that everything runs; the figures mean nothing."""
    threads: int = 1
    """Threads of PyTorch on a CPU."""
    clock: Literal["wall", "process"] = "wall"
    """On a CPU: time on the wall, or the processor time that this process got, for a machine that is busy with else."""
    rounds: int | None = None
    """Rounds; in each, every contender takes its turn."""
    seconds: float | None = None
    """Stop starting new cases, and end rounds early, after so many seconds."""
    out: Path | None = None
    """Folder for the results; benchmarks/results without --quick, nowhere with it."""


Filled = TypeVar("Filled", bound=Settings)


def fill(settings: Filled, presets: Mapping[str, Mapping[str, Any]]) -> Filled:
    """Put the preset's values where the settings have none, check the device, set the threads."""
    if settings.device not in ("cpu", "cuda"):
        raise UserError(f"`device` must be cpu or cuda, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "there is no GPU here that this torch can use; run this on a machine with one, or add --device cpu --quick "
            "to try the script"
        )
    torch.set_num_threads(settings.threads)
    preset = presets["quick" if settings.quick else settings.device]
    out = settings.out or (None if settings.quick else RESULTS)
    values = {key: value for key, value in preset.items() if getattr(settings, key) is None}
    return dataclasses.replace(settings, out=out, **values)


class Budget:
    """Seconds that may be used, counted from now; no limit if None."""

    def __init__(self, seconds: float | None) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def used(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return math.inf if self.seconds is None else self.seconds - self.used

    def part(self, share: float) -> float | None:
        """Seconds that are this share of what is left."""
        return None if self.seconds is None else max(0.0, share * self.left)


class Timer:
    """Seconds that some work takes. On a GPU: device time, with a cold L2 cache, once the work is queued."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.now = settings.device, clock(settings)
        if self.device == "cuda":
            size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
            self.flush = torch.empty(max(4 * size, 2**28), dtype=torch.uint8, device="cuda")

    def __call__(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds and what the work returned."""
        if self.device == "cpu":
            start = self.now()
            result = work()
            return self.now() - start, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, result


def clock(settings: Settings) -> Callable[[], float]:
    """A clock that reads seconds when all work is done."""
    if settings.device == "cpu":
        return time.process_time if settings.clock == "process" else time.perf_counter

    def after_the_gpu() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return after_the_gpu


def take_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2, budget: Budget | None = None
) -> dict[str, list[Any]]:
    """Call every contender once a round, in turned order every other round, so that none always follows another.

    Ends early, with three rounds at least, when the budget is used.
    """
    results: dict[str, list[Any]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        if budget is not None and budget.left <= 0 and number >= min(FEWEST_ROUNDS, rounds):
            break
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            value = contenders[name]()
            if number >= 0:
                results[name].append(value)
    return results


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of values."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "quartiles": [low, high], "rounds": len(values)}


def ratio(values: Sequence[float], over: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the ratio within each round, where both ran next to each other."""
    return spread([value / other for value, other in zip(values, over, strict=True)])


def peak_copy(timer: Timer, size: int) -> float:
    """Bytes a second, read and written, of copying ``size`` bytes: the best of ten, for what the memory can give."""
    source = torch.ones(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * size / min(timer(lambda: target.copy_(source))[0] for _ in range(10))


def machine(settings: Settings) -> dict[str, Any]:
    """Versions, processor and load, so that a figure can be told from another machine's."""
    try:
        from geonorm.provenance import environment

        facts = {key: value for key, value in environment().items() if key != "threads_per_trial"}
    except ModuleNotFoundError:
        # A machine that was lent for its GPU may have little more than PyTorch; the step needs no more.
        facts = {"geonorm": geonorm.__version__, "torch": torch.__version__, "python": platform.python_version()}
        facts |= {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    facts |= {"threads": settings.threads, "clock": settings.clock}
    facts["load_average"] = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    if settings.device == "cuda":
        facts["gpu"], facts["cuda"] = torch.cuda.get_device_name(0), torch.version.cuda
    return facts


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table; numbers with three digits, medians with their quartiles."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, ["---"] * len(columns), *([_cell(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    cells[1] = ["-" * width for width in widths]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and "median" in value:
        low, high = (_cell(quartile) for quartile in value["quartiles"])
        return f"{_cell(value['median'])} [{low}, {high}]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    return "" if value is None else str(value)


def report(name: str, settings: Settings, result: dict[str, Any], tables: Mapping[str, Sequence[Mapping]]) -> None:
    """Print the tables; write them and the JSON where the settings say."""
    text = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in tables.items() if rows)
    print(text, flush=True)
    if settings.out is None:
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    stem = name if settings.device == "cpu" or name == "gpu" else f"{name}-{settings.device}"
    (settings.out / f"{stem}.json").write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    heading = f"# {name}\n\n`{result['command']}`, {result['seconds']:.0f} seconds\n\n"
    facts = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)
    (settings.out / f"{stem}.md").write_text(f"{heading}{facts}\n\n{text}\n", encoding="utf-8")
    print(f"\nwrote {settings.out / stem}.json and .md", flush=True)


def header(name: str, settings: Settings) -> dict[str, Any]:
    """How a result came about: the command and the machine; ``seconds`` is filled in at the end."""
    typed = sys.argv[1:] if Path(sys.argv[0]).stem == name else []
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *typed])
    chosen = {key: value for key, value in dataclasses.asdict(settings).items() if key != "out"}
    return {"command": command, "settings": chosen, "machine": machine(settings), "seconds": 0.0}


def command_line(kind: type[Filled], run: Callable[[Filled], Any], description: str | None) -> None:
    """Read the options and run; a mistake of the user ends in one line and code 2."""
    try:
        run(tyro.cli(kind, description=(description or "").splitlines()[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
