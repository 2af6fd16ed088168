"""Speed of a run: time a step, tokens a second, the share of the device's peak that is used, peak memory."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from geonorm.training.distributed import Ranks

_MATRIX = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 5


def flops_per_token(model: nn.Module, length: int) -> float:
    """Floating-point operations that training takes for one token: ``6 N + 12 L H Q T`` (arXiv 2204.02311, appendix B).

    N counts every parameter but those of an embedding that is only looked up, L layers, H heads of size Q, T tokens a
    window. Norms, softmax and recomputation are not counted, and causal attention is counted in full, as usual.

    Args:
        model: a language model, before it is cut over ranks.
        length: tokens a window.
    """
    config: Any = model.config
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is embedding.weight
    num_matrix = total if tied else total - embedding.weight.numel()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_size * length
    return 6.0 * num_matrix + 12.0 * attention


def measured_peak(device: torch.device, precision: str) -> float:
    """Median FLOP/s of one large square matrix product: what this device gives, not what its data sheet says."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = _MATRIX[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    rates = []
    for _ in range(_ROUNDS):
        _wait(device)
        begin = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        rates.append(2 * size**3 / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of torch on a GPU, of the process else; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(ModuleNotFoundError):  # not on Windows
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None


class Throughput:
    """Speed since the last time it was asked.

    Attributes:
        peak: FLOP/s of one device, or 0 if unknown.
    """

    def __init__(self, flops: float, peak: float, ranks: Ranks, step: int, seconds: float) -> None:
        """Start to measure.

        Args:
            flops: of one token, see :func:`flops_per_token`.
            peak: see above.
            ranks: the processes that share the work.
            step: steps done so far; seconds: their time.
        """
        self.flops, self.peak, self.ranks = flops, peak, ranks
        self._step, self._seconds = step, seconds

    def since(self, step: int, seconds: float, tokens_per_step: int) -> dict[str, Any]:
        """Numbers for a row of metrics: ``step_seconds``, ``tokens_per_second``, ``mfu``, ``peak_memory_bytes``."""
        taken = (seconds - self._seconds) / max(1, step - self._step)
        self._step, self._seconds = step, seconds
        rate = tokens_per_step / taken
        used = rate * self.flops / (self.peak * self.ranks.world_size) if self.peak else None
        memory = peak_memory(self.ranks.device)
        return {"step_seconds": taken, "tokens_per_second": rate, "mfu": used, "peak_memory_bytes": memory}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
