"""Every family in every placement; and that docs/families.md tells of all of them."""

from __future__ import annotations

import pytest

from family_checks import CHECKS, EVERYWHERE
from family_models import FAMILIES, PLACEMENTS, stock_model
from geonorm.models import stock_placement
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


@pytest.mark.parametrize(("family", "placement", "check"), CASES)
def test_every_family_in_every_placement(family, placement, check, tmp_path):
    CHECKS[check](family, placement, tmp_path)


def test_the_page_tells_of_every_family_and_check():
    text = PAGE.read_text(encoding="utf-8")
    for row in family_rows():
        assert row in text, "run `python tests/write_families.py`"
    lines = [line.split("|")[1].strip() for line in text.split("## What was run")[1].splitlines() if "|" in line]
    assert lines[2:] == FAMILIES
    for check in CHECKS.values():
        assert check.__doc__ in text
    assert ", ".join(f"`{name}`" for name in PLACEMENTS) in text
