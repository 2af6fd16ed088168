"""Write docs/families.md: what is special about each family, and which checks it passed in how many placements.

``python tests/write_families.py`` wires every placement into every family, and runs every check of
``family_checks.py`` for every family in some placements.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from family_checks import CHECKS
from family_models import FAMILIES, PLACEMENTS, adapter_of, prompts, stock_model
from geonorm import UserError
from geonorm.models import rewire, stock_placement
from geonorm.placements import available

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
INTRODUCTION = """# Families of models

`geonorm.models.rewire(model, placement)` gives a decoder of these Hugging Face families any placement. The model keeps
its own attention, MLP, embeddings and head; its block gets the placement's connections around the first two.

The column "placement" is what the stock class wires, as `geonorm.models.stock_placement(model)` names it. Rewiring to
it changes no bit of the logits. Our classes are named after the stock ones, `GeonormLlamaForCausalLM` after
`LlamaForCausalLM`, with `geonorm_llama` as the type in the configuration. One row of the table in
`src/geonorm/models/families.py` adds a family; it says where the family differs from Llama's layout.

"""
LIMITS = """
What a stock block does to a sub-layer's output before the addition counts as part of the sub-layer in every placement:
dropout (`phi3`, `gpt_neox`; in `gpt2` it is inside the sub-layers) and the `residual_multiplier` of `granite`. So a
norm on the output (`sandwich`, `output`) comes after them and undoes the multiplier. Multipliers on embedding,
attention and logits stay as they are; a placement that normalises the entry undoes the one on the embedding.

`geonorm.models.load_stock(folder, placement)` reads a stock checkpoint, keeps every weight that has a place, and gives
the model back with a report of the norms that had none and of those that are new.

A model with quantised weights (bitsandbytes, torchao) is rewired with these as they are. Drawing them anew
(`init=True`) and `geonorm convert` need weights in floating point. Rewire a model before accelerate spreads it over
devices or FSDP shards it: a layer that is wrapped, or whose forward was replaced, is refused. After any failure the
model is as it was.

Not supported: encoders, models with cross-attention, other heads than the language-model head, mixtures of experts.
`geonorm.placements.Wiring` serves models of one's own.
"""


def family_rows() -> list[str]:
    """One line of the first table for each family."""
    rows = []
    for family in FAMILIES:
        adapter, placement = adapter_of(family), stock_placement(stock_model(family))
        stock = f"`{adapter.stock.causal_lm.__name__}`, `{adapter.stock.model.__name__}`"
        rows.append(f"| {family} | {stock} | `{placement.label()}` | {adapter.note} |")
    return rows


WIRED = """
## Placements and families

All {count} placements were wired into all {families} rows of the table above, weights drawn anew: a finite loss, and a
finite gradient for every parameter. These refuse, in one line, and leave the model as it was:

| placement | refused by | because the family keeps in one weight |
|---|---|---|
{rows}

A module on one projection has no place in a weight that holds several. Quantised projections are refused by the same
placements.

Norms on query and key (`qwen3`, `gemma3_text`, `olmo2`) belong to attention and stay in every placement: `hybrid` puts
its own after the projection and so before them, `ngpt` brings queries and keys to length 1 after them and after
rotation. `ngpt` keeps biases where a family has them; its paper has none. `mix` refuses some placements as parts of it,
in any family ([placements.md](placements.md#all-of-them)).

An adapter of peft on a projection that has a module after it (`hybrid`: query, key, value; `ngpt`: the MLP's inputs
and the head) is added after that module. It trains, is saved and is loaded so; merged into the weight it would come
before the module and give other logits, so do not merge adapters on these projections.
"""


def wired() -> str:
    """The section on which placements work with which family; raises where one fails otherwise than by refusing."""
    refused: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        for placement in available():
            try:
                model = rewire(stock_model(family), placement, init=True)
            except UserError as error:
                fused = str(error).partition(" keeps ")[2].partition(" in one weight")[0]
                refused.setdefault((placement, fused), []).append(family)
                continue
            ids = prompts(2, 9)
            model(input_ids=ids, labels=ids).loss.backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, (family, placement, name)
                assert parameter.grad.isfinite().all(), (family, placement, name)
    rows = [f"| `{placement}` | {', '.join(names)} | {fused} |" for (placement, fused), names in refused.items()]
    return WIRED.format(count=len(available()), families=len(FAMILIES), rows="\n".join(rows))


def outcome(family: str, check: str) -> str:
    """In how many placements a family passed a check, and what the check says about it."""
    passed, notes = 0, set()
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink:
            try:
                with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
                    note = CHECKS[check](family, placement, Path(folder))
            except Exception as error:
                print(f"{family}, {placement}, {check}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        passed += 1
        notes |= {note} if note else set()
    return f"{passed}/{len(PLACEMENTS)}" + "".join(f" ({note})" for note in sorted(notes))


def main() -> None:
    torch.set_num_threads(1)
    lines = ["| family | stock classes | placement | special |", "|---|---|---|---|", *family_rows(), LIMITS + wired()]
    placements = ", ".join(f"`{name}`" for name in PLACEMENTS)
    lines += [
        "## What was run",
        "",
        f"Tiny random models (width 32, two layers) in the placements {placements}, on a CPU with torch",
        f"{torch.__version__.partition('+')[0]} and transformers {transformers.__version__}; written by "
        "`python tests/write_families.py`. Placements passed of placements tried:",
        "",
        f"| family | {' | '.join(CHECKS)} |",
        f"|---|{'---|' * len(CHECKS)}",
    ]
    for family in FAMILIES:
        lines.append(f"| {family} | {' | '.join(outcome(family, check) for check in CHECKS)} |")
        print(lines[-1])
    lines += ["", *(f"- **{name}**: {check.__doc__}" for name, check in CHECKS.items()), ""]
    PAGE.write_text(INTRODUCTION + "\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
