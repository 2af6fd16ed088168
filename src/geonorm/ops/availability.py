"""Whether the Triton kernels can run on a tensor, found out without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True if the environment asks triton to interpret kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run, with the remedy, in one line; None if they can.

    Args:
        device: where the tensors are.
        dtype: what the arithmetic would be done in.
    """
    if not TRITON_INSTALLED:
        return "the package triton is not installed; `pip install triton` (Linux), or leave impl='auto'"
    if dtype == torch.float64:
        return "its arithmetic is float32 and an input is float64; leave impl='auto'"
    if device.type != "cuda" and not interpreting():
        return (
            f"it needs a GPU and the tensor is on {device.type}; move it there, or leave impl='auto', or set "
            "TRITON_INTERPRET=1 before Python starts to interpret the kernels, slowly, for a test"
        )
    return None
