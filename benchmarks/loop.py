"""What the loop costs over the work it is there for: ``python -m benchmarks.loop``.

A step of the loop against a bare forward pass, backward pass, clipping and optimiser step of the same model on the same
windows, in turn within every round. Times are those of the process on its core, so that other work on the machine
counts little; the ratio is the median over rounds. Without clipping, the bare step is shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from geonorm.data import TokenFile, Windows
from geonorm.models import ModelShape, build_model
from geonorm.storage import write_json
from geonorm.training.config import EvaluationConfig, RunConfig, ScheduleConfig
from geonorm.training.counters import Counters
from geonorm.training.distributed import Parallel, solo
from geonorm.training.loop import Loop
from geonorm.training.optimizer import adamw, make_optimizer, parameter_groups
from geonorm.training.outcome import Data

SETTINGS = RunConfig(
    steps=10_000,
    schedule=ScheduleConfig(warmup=1),
    evaluation=EvaluationConfig(log_every=10_000, layers_every=10_000),
)
SHAPE = ModelShape(hidden_size=128, num_layers=8, num_heads=4)
VOCABULARY = 1024
RESULTS = Path(__file__).parent / "results" / "loop.json"


def random_windows(folder: Path) -> Windows:
    """Windows of a token file of random ids."""
    path = folder / "train.tokens"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 1_000_000).astype("<u2")
    ids.tofile(path)
    write_json(path.with_name(f"{path.name}.json"), {"format": 1, "dtype": "<u2", "num_tokens": len(ids)})
    return Windows(TokenFile(path), length=SETTINGS.data.seq_len)


def fresh_model() -> nn.Module:
    return build_model(SHAPE, "geonorm", {}, vocab_size=VOCABULARY, length=SETTINGS.data.seq_len, seed=0)


def bare(windows: Windows, clip: bool) -> Callable[[int], None]:
    """A step as one writes it by hand; its windows are tensors already."""
    model = fresh_model().train()
    optimizer = adamw(
        parameter_groups(model, SETTINGS.optimizer.weight_decay),
        lr=SETTINGS.optimizer.lr,
        betas=SETTINGS.optimizer.betas,
    )
    batches = [
        torch.from_numpy(windows.batch(number * SETTINGS.global_batch_size, SETTINGS.global_batch_size))
        for number in range(8)
    ]

    def step(number: int) -> None:
        ids = batches[number % len(batches)]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def looped(windows: Windows) -> Callable[[int], None]:
    """A step of the loop, with losses enough behind it that spikes are looked for."""
    model = fresh_model().train()
    ranks = solo(torch.device("cpu"))
    optimizer, schedule = make_optimizer(model, SETTINGS)
    progress = Counters.start(SETTINGS.steps)
    progress.recent.extend(7.0 + 0.01 * number % 1 for number in range(1000))
    data = Data(windows, windows.gather(np.arange(16)), np.ones(VOCABULARY, dtype=np.int64))
    loop = Loop(Parallel(model, ranks), ranks, data, SETTINGS, optimizer, schedule, lambda row: None, progress)
    # The first step is measured layer by layer.
    return lambda number: loop.take_step(number + 2) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        windows = random_windows(Path(place))
        contenders = {
            "bare": bare(windows, clip=True),
            "loop": looped(windows),
            "bare, no clipping": bare(windows, False),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(options.rounds + 2):
            # In another order each round, since each one leaves the caches to the next.
            names = list(contenders)[number % 3 :] + list(contenders)[: number % 3]
            for name in names:
                begin = time.process_time()
                contenders[name](number)
                times[name].append(time.process_time() - begin)
    rows = {}
    for name, values in times.items():
        kept, base = values[2:], times["bare"][2:]
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(kept, base, strict=True)], n=4)
        rows[name] = {"ms": statistics.median(kept) * 1e3, "over_bare": ratio, "quartiles": [low, high]}
        print(f"{name:<18} {rows[name]['ms']:8.1f} ms  {ratio:.3f} of bare  [{low:.3f}, {high:.3f}]")
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        facts = {"command": f"python -m benchmarks.loop --rounds {options.rounds}", "torch": torch.__version__}
        RESULTS.write_text(json.dumps({**facts, "threads": 1, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
