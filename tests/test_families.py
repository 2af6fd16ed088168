"""Every family in every placement; and that docs/families.md tells of all of them."""

from __future__ import annotations

import pytest
import torch

from family_checks import CHECKS, EVERYWHERE
from family_models import FAMILIES, NEWER, PLACEMENTS, REFUSED, is_refused, prompts, stock_model
from geonorm import UserError
from geonorm.models import rewire, stock_placement
from geonorm.placements import available
from write_families import PAGE, family_rows


def stock_name(family):
    return stock_placement(stock_model(family)).name


QUICK = {(family, name) for family in FAMILIES for name in ("geonorm", stock_name(family))}
QUICK |= {(family, placement) for family in ("llama", "gpt2") for placement in PLACEMENTS}
CASES = [
    pytest.param(
        family, placement, check, marks=[] if check in EVERYWHERE or (family, placement) in QUICK else pytest.mark.slow
    )
    for family in FAMILIES
    for placement in PLACEMENTS
    for check in CHECKS
]
# Trainers and adapters meet nothing new in a newer placement; of kernels tests/test_rewired_placements.py tries two.
CASES += [
    pytest.param(
        "llama",
        placement,
        check,
        marks=pytest.mark.slow if check in ("attention kernels", "trainer", "adapter") else [],
    )
    for placement in NEWER
    for check in CHECKS
]
CASES += [
    pytest.param("gpt2", placement, check)
    for placement in NEWER
    for check in ("save, reload", "generate")
    if not is_refused("gpt2", placement)
]


@pytest.mark.parametrize(("family", "placement", "check"), CASES)
def test_every_family_in_every_placement(family, placement, check, tmp_path):
    CHECKS[check](family, placement, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_placement_works_with_a_family_or_refuses_it(family):
    """One backward pass gives every parameter a finite gradient; a refusal is one line and leaves the model."""
    ids = prompts(2, 9)
    for placement in available():
        model = stock_model(family)
        if is_refused(family, placement):
            before = model(ids).logits
            parts = REFUSED[placement][1]
            with pytest.raises(UserError, match=f"placement '{placement}' works on .*{parts} in one weight") as caught:
                rewire(model, placement)
            assert "\n" not in str(caught.value)
            assert torch.equal(model(ids).logits, before)
            continue
        loss = rewire(model, placement, init=True)(ids, labels=ids).loss
        loss.backward()
        assert bool(loss.isfinite()), placement
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (placement, name)
            assert bool(parameter.grad.isfinite().all()), (placement, name)


def test_the_page_tells_which_placements_refuse_which_families():
    text = PAGE.read_text(encoding="utf-8")
    for placement, (families, parts) in REFUSED.items():
        assert f"| `{placement}` | {', '.join(families)} | {parts} |" in text
    rows = text.split("because the family keeps")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(REFUSED)


def test_the_page_tells_of_every_family_and_check():
    text = PAGE.read_text(encoding="utf-8")
    for row in family_rows():
        assert row in text, "run `python tests/write_families.py`"
    lines = [line.split("|")[1].strip() for line in text.split("## What was run")[1].splitlines() if "|" in line]
    assert lines[2:] == FAMILIES
    for check in CHECKS.values():
        assert check.__doc__ in text
    assert ", ".join(f"`{name}`" for name in PLACEMENTS) in text
