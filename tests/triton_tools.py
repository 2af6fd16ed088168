"""What the tests of the Triton kernels share; importing it skips a file whose kernels cannot run here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from geonorm.ops import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu" and not launch.kernels.INTERPRETED:
    pytest.skip("there is no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

# Fixtures of conftest.py; and the interpreter is numpy, which says aloud what a GPU does silently with infinities.
as_on_a_gpu = [
    pytest.mark.usefixtures("nan_in_empty_buffers", "bfloat16_is_rounded"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]


def walks(block):
    """Run a test in one pass over each row, and in blocks of this size."""
    return pytest.mark.parametrize("walk", [None, block], ids=["one pass", "looped"], indirect=True)


def walk_blocks_of(size, monkeypatch):
    """Walk every row block by block, as only very wide ones are otherwise."""
    monkeypatch.setattr(launch, "FORWARD_LIMIT", 0)
    monkeypatch.setattr(launch, "BACKWARD_LIMIT", 0)
    monkeypatch.setattr(launch, "WALK", size)
