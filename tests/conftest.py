"""Shared fixtures: one thread, a fixed seed, and the reference rows that may lie beside the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

# Read when triton is first imported, which any test may cause: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED_ORACLE = Path(__file__).resolve().parents[2] / "shared" / "oracle" / "sphere_step.json"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared_oracle() -> list[dict]:
    """Rows of the step and its gradients from 60-digit arithmetic, kept outside the repository."""
    if not SHARED_ORACLE.is_file():
        pytest.skip("the shared table of reference rows is not beside this repository; the own table covers it")
    return json.loads(SHARED_ORACLE.read_text())["cases"]
