"""Run by torchrun with two ranks: every placement under DDP and FSDP2 against the same steps in one process.

``torchrun --nproc-per-node 2 tests/mp_train.py CORPUS OUT PLACEMENT...`` prints one JSON line a case: the largest
differences of the losses and of the first gradients, and by how much the lengths of weights that a placement keeps at 1
are off. Labels are missing here and there, and not as often on one rank as
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
from geonorm.models.adapter import config_placement
from geonorm.models.weights import full_tensor
from geonorm.placements import Learned
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.counters import Counters
from geonorm.training.distributed import Parallel, Ranks, joined, solo
from geonorm.training.loop import Loop
from geonorm.training.optimizer import Schedule, make_optimizer, muon_with_adamw
from geonorm.training.outcome import Data
from geonorm.training.state import collect
from run_configs import run_config

STEPS = 4
# Options that any placement can have, together.
OPTIONS = {"gain": "channel", "warm_depth": 2, "entry_skip": True, "norm": "dyt"}
# Gradients of these are small sums of many large terms: those of one number for all channels, and of logits of a
# softmax, which are 0 while all streams are equal. Their rounding is compared with the largest of the placement's own.
CANCELLING = (
    "alpha",
    "stream_scale",
    "entry_scale",
    "comb.weight",
    "comb.bias",
    "comb.scale",
    "mixture",
    "query.weight",
)
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
        "own": own_names(model),
        "length": length_error(model),
        "state": collect(model, optimizer, ranks),
    }


def length_error(model) -> float:
    """How far weights of attention and MLP that the placement keeps at length 1 are from it; 0 where it keeps none."""
    axes = config_placement(model.config).weight_axes
    names = {"q_proj": "query", "o_proj": "attention_output", "gate_proj": "mlp_input", "down_proj": "mlp_output"}
    errors = [0.0]
    for name, parameter in model.named_parameters():
        role = names.get(name.split(".")[-2])
        if role in axes and name.endswith(".weight"):
            lengths = full_tensor(parameter.detach()).norm(dim=axes[role])
            errors.append((lengths - 1).abs().max().item())
    return max(errors)


def own_names(model) -> list[str]:
    """Parameters of the placement's modules that may come out by cancelling; a learnable step size has its own size."""
    own = {id(p) for module in model.modules() if isinstance(module, Learned) for p in module.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in own and not name.endswith("raw_alpha")]


def gradient_difference(mine: dict, theirs: dict, own: list[str]) -> float:
    largest = max((theirs[name].abs().max().item() for name in own), default=0.0)
    differences = []
    for name, value in theirs.items():
        size = largest if name in own and name.endswith(CANCELLING) else value.abs().max().item()
        differences.append((mine[name] - value).abs().max().item() / size)
    # Unlike max, passes NaN on.
    return float(np.max(differences))


def worst(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    corpus, out = Corpus.load(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    cases = [(name, {}, False) for name in sys.argv[3:]]
    cases += [("geonorm", {"learnable": True}, False), ("geonorm", {}, True), ("pre", OPTIONS, False)]
    with joined("ddp", "cpu") as ranks:
        for placement, options, muon in cases:
            alone = train(corpus, placement, options, solo(torch.device("cpu")), "none", muon)
            for kind in ("ddp", "fsdp"):
                got = train(corpus, placement, options, ranks, kind, muon)
                difference = gradient_difference(got["gradients"], alone["gradients"], alone["own"])
                case = {"placement": placement, "options": options, "kind": kind, "muon": muon}
                case |= {"loss": worst(got["losses"], alone["losses"]), "gradient": difference}
                case |= {
                    "layers": worst(got["layers"], alone["layers"]),
                    "losses": got["losses"],
                    "length": got["length"],
                }
                if ranks.is_main:
                    print(json.dumps(case), flush=True)
                if "learnable" in options:
                    Checkpoints(out / kind, ranks).save(STEPS, got["state"], {"run": kind})
                    gathered = {name: full_tensor(value.detach()) for name, value in got["state"].items()}
                    if ranks.is_main:
                        save_file(gathered, out / f"{kind}.safetensors")
            ranks.barrier()


if __name__ == "__main__":
    main()
