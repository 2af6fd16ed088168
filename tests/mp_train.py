"""Run by torchrun with two ranks: every placement under DDP and FSDP2 against the same steps in one process.

``torchrun --nproc-per-node 2 tests/mp_train.py CORPUS OUT PLACEMENT...`` prints one JSON line a case: the largest
differences of the losses and of the first gradients. Labels are missing here and there, and not as often on one rank as
on the other, in training and in evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from geonorm.data import Corpus, Windows
from geonorm.models import ModelShape, build_model
from geonorm.models.weights import full_tensor
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.counters import Counters
from geonorm.training.distributed import Parallel, Ranks, joined, solo
from geonorm.training.loop import Loop
from geonorm.training.optimizer import Schedule, make_optimizer, muon_with_adamw
from geonorm.training.outcome import Data
from geonorm.training.state import collect
from run_configs import run_config

STEPS = 4
SETTINGS = run_config(
    steps=STEPS, batch=8, accumulation=2, length=16, warmup=1, lr=4e-3, clip=1e9, log_every=1, eval_every=STEPS
)


class Ragged(Windows):
    """Windows with labels at their ends alone: the more, the higher the position in the batch.

    In the second step those of the first rank have none, in the third nobody's.
    """

    def mask(self, start: int, size: int):
        mask = np.zeros((size, self.length + 1), dtype=bool)
        for row in range(size):
            step, place = divmod(start + row, SETTINGS.global_batch_size)
            mask[row, -2 - place :] = not (step == 2 or (step == 1 and place < SETTINGS.global_batch_size // 2))
        return mask


def train(corpus: Corpus, placement: str, options: dict, ranks: Ranks, kind: str, muon: bool = False) -> dict:
    torch.manual_seed(0)
    shape = ModelShape(hidden_size=16, num_layers=2, num_heads=2)
    model = build_model(shape, placement, options, vocab_size=corpus.vocab_size, length=16, seed=0)
    parallel = Parallel(model, ranks, kind)
    optimizer, schedule = make_optimizer(model, SETTINGS)
    if muon:
        optimizer = muon_with_adamw(model, lr=4e-3, betas=(0.9, 0.95), momentum=0.95, weight_decay=0.1)
        schedule = Schedule(optimizer, lambda step: 1.0)
    rows, gradients = [], {}
    take = optimizer.step

    def step() -> None:
        if not gradients:
            gradients.update({name: full_tensor(p.grad).clone() for name, p in model.named_parameters()})
        take()

    optimizer.step = step
    windows = Ragged(corpus.train, length=16, seed=0)
    held_out = dataclasses.replace(corpus.held_out("val", 16, 5), mask=windows.mask(2, 5))
    data = Data(windows, held_out, corpus.token_bytes)
    loop = Loop(parallel, ranks, data, SETTINGS, optimizer, schedule, rows.append, Counters.start(STEPS))
    outcome = loop.run()
    return {
        "losses": [row["loss"] for row in rows if row["kind"] == "train"] + [outcome.evaluation.loss],
        "layers": [value for row in rows if row["kind"] == "layers" for value in row["grad_norm"]],
        "gradients": gradients,
        "state": collect(model, optimizer, ranks),
    }


def worst(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    corpus, out = Corpus.load(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    cases = [(name, {}, False) for name in sys.argv[3:]]
    cases += [("geonorm", {"learnable": True}, False), ("geonorm", {}, True)]
    with joined("ddp", "cpu") as ranks:
        for placement, options, muon in cases:
            alone = train(corpus, placement, options, solo(torch.device("cpu")), "none", muon)
            for kind in ("ddp", "fsdp"):
                got = train(corpus, placement, options, ranks, kind, muon)
                difference = max(
                    ((got["gradients"][name] - value).abs().max() / value.abs().max()).item()
                    for name, value in alone["gradients"].items()
                )
                case = {"placement": placement, "options": options, "kind": kind, "muon": muon}
                case |= {"loss": worst(got["losses"], alone["losses"]), "gradient": difference}
                case |= {"layers": worst(got["layers"], alone["layers"]), "losses": got["losses"]}
                if ranks.is_main:
                    print(json.dumps(case), flush=True)
                if options:
                    Checkpoints(out / kind, ranks).save(STEPS, got["state"], {"run": kind})
                    gathered = {name: full_tensor(value.detach()) for name, value in got["state"].items()}
                    if ranks.is_main:
                        save_file(gathered, out / f"{kind}.safetensors")
            ranks.barrier()


if __name__ == "__main__":
    main()
