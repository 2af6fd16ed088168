"""How often the 95 % intervals of a comparison hold the truth, by simulation with known answers.

    python -m benchmarks.coverage

Losses are drawn with a part by seed, a part by document, a part by window that all seeds share, and a rest; documents
are of unequal size, the largest four times the smallest, 256 windows in all.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, table
from geonorm.sweep.statistics import estimate

# Standard deviations by seed and by document; those by window are 1 (shared) and 0.3 (the rest).
SCENARIOS = {"seeds": (0.3, 0.0), "documents": (0.0, 0.5), "both": (0.15, 0.5), "neither": (0.0, 0.0)}
_WINDOWS, _SHARED, _REST = 256, 1.0, 0.3


@dataclasses.dataclass(frozen=True)
class CoverageSettings:
    """Options."""

    repeats: int = 4000
    """Draws a case; the standard error of a share near 0.95 is 0.22 over their square root."""
    seeds: tuple[int, ...] = (2, 3, 5)
    """Numbers of seeds."""
    documents: tuple[int, ...] = (5, 8, 10, 30)
    """Numbers of documents."""
    out: Path | None = RESULTS
    """Folder for coverage.json."""


def simulate(settings: CoverageSettings, scenarios: Iterable[str] = SCENARIOS) -> list[dict[str, Any]]:
    """One row a case: what varies, numbers of seeds and documents, coverage and median width of the interval."""
    rows = []
    for name in scenarios:
        for num_seeds in settings.seeds:
            for num_documents in settings.documents:
                rng = np.random.default_rng([list(SCENARIOS).index(name), num_seeds, num_documents])
                drawn = [_interval(rng, *SCENARIOS[name], num_seeds, num_documents) for _ in range(settings.repeats)]
                low, high = np.array(drawn).T
                covered = float(np.mean((low <= 0) & (high >= 0)))
                row = {"varies": name, "seeds": num_seeds, "documents": num_documents, "coverage": round(covered, 4)}
                rows.append({**row, "width": round(float(np.median(high - low)), 4)})
    return rows


def _interval(rng: np.random.Generator, by_seed: float, by_document: float, seeds: int, documents: int) -> list[float]:
    weights = np.linspace(1, 4, documents)
    sizes = np.maximum(1, np.floor(_WINDOWS * weights / weights.sum())).astype(int)
    index = np.repeat(np.arange(documents), sizes)
    text = rng.normal(0, by_document, documents)[index] + rng.normal(0, _SHARED, len(index))
    losses = text + rng.normal(0, by_seed, (seeds, 1)) + rng.normal(0, _REST, (seeds, len(index)))
    interval = estimate(losses, index).interval()
    assert interval is not None
    return interval


def main(settings: CoverageSettings) -> None:
    """Simulate every case, print the table, write the JSON."""
    start = time.monotonic()
    rows = simulate(settings)
    wide = [
        {"varies": name, "seeds": count, **{f"{row['documents']} documents": row["coverage"] for row in mine}}
        for name in SCENARIOS
        for count in settings.seeds
        if (mine := [row for row in rows if (row["varies"], row["seeds"]) == (name, count)])
    ]
    print(table(wide))
    if settings.out is not None:
        content = {
            "command": "python -m benchmarks.coverage",
            "repeats": settings.repeats,
            "standard_error": round((0.95 * 0.05 / settings.repeats) ** 0.5, 4),
            "seconds": round(time.monotonic() - start),
            "rows": rows,
        }
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "coverage.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(CoverageSettings, description="How often intervals hold the truth."))
