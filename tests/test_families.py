"""Every family in every placement, and what is special about single families."""

from __future__ import annotations

import pytest

from family_checks import CHECKS
from family_models import FAMILIES, PLACEMENTS


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_placement(family, placement, check, tmp_path):
    CHECKS[check](family, placement, tmp_path)
