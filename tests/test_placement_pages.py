"""The pages on placements tell of every one, and their example does what they say."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from geonorm.placements import REGISTRY, Placement, Wiring, available
from write_families import PAGE, wired

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACEMENTS = (DOCS / "placements.md").read_text(encoding="utf-8")
MATH = (DOCS / "math.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", available())
def test_every_placement_has_its_row_its_formula_and_its_init(name):
    row = next(line for line in PLACEMENTS.splitlines() if line.startswith(f"| `{name}` |"))
    shared = {field.name for field in dataclasses.fields(Placement)}
    own = {field.name for field in dataclasses.fields(REGISTRY[name])} - shared - {"normalize_entry"}
    if name != "spheret":  # Those of geonorm, by its name.
        assert all(f"`{field}" in row for field in own)
    view, init = MATH.split("## One view of every placement")[1].split("## Initialisation")
    for table in (view, init):
        assert re.search(rf"^\| `[^|]*\b{name}`", table, flags=re.MULTILINE) or f"`{name}`" in table


def test_every_option_of_all_placements_is_told():
    section = MATH.split("## Options of every placement")[1].split("## One view")[0]
    for field in dataclasses.fields(Placement):
        assert f"`{field.name}" in section, field.name


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"```.*?```", "", PLACEMENTS, flags=re.DOTALL)):
        page, _, heading = target.partition("#")
        text = (DOCS / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        if heading:
            assert heading in [one.lower().replace(" ", "-").replace(",", "") for one in headings], target


def test_the_example_is_a_placement_that_starts_as_pre_norm(monkeypatch):
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", PLACEMENTS, flags=re.DOTALL) if "class GPAS" in code
    )
    module = types.ModuleType("gpas_of_the_page")
    # Where a dataclass looks up the names of its annotations.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(example, "docs/placements.md", "exec"), vars(module))
    stream = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))

    def walked(wiring):
        x = wiring.enter(stream)
        for connection in wiring.connections:
            x = connection(x, torch.tanh)
        return wiring.exit(x)

    gpas = Wiring(module.GPAS(), 16, 2)
    assert torch.equal(walked(gpas), walked(Wiring("pre", 16, 2)))
    walked(gpas).sum().backward()
    assert all(connection.connection.gate.grad is not None for connection in gpas.connections)


@pytest.mark.slow
def test_which_placements_work_with_which_family():
    assert wired() in PAGE.read_text(encoding="utf-8"), "run `python tests/write_families.py`"
