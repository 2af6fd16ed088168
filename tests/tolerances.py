"""Every tolerance of the suite, derived from the rounding unit of the dtype. Never loosened to make a test pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}

# Against 50-digit arithmetic, relative to the largest entry of the row (or 1): a few thousand roundings, 1.8e-12.
# Nothing in a step of five numbers needs more, and a lost digit in any formula shows as 1e-10 or worse.
ORACLE_64 = 8192 * EPS[torch.float64]

# Two float64 formulas for the same number, well conditioned.
SAME_64 = 1024 * EPS[torch.float64]

# Angles in float32: below 1e-4 rad the two rows share all but ten bits, and the quotient keeps these.
SMALL_ANGLE = 0.01

# Radius after many steps that name it: one rounding of the arithmetic and of the output, whatever their number.
RADIUS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}

# A sum over many rows of bfloat16 inputs, reduced in float32.
REDUCED = 0.01

# Loss after a few steps on ranks against one process, float32: gradients are summed in another order, and AdamW's first
# steps, which divide a gradient by its own size, carry such a difference on.
PARALLEL_LOSS = 1e3 * EPS[torch.float32]

# Bytes that autograd keeps against the estimate: the first and last layer differ from others by a few small tensors.
SAVED_BYTES = 0.03

# Operations that torch counts against 6 N + 12 L d T: the rotary angles are a product, norm gains count as weights.
UNCOUNTED_FLOPS = 0.01

# Two ranks against one process, relative: float32 sums of a few dozen terms in another order, 1e-6. A mean of means
# over ragged labels is wrong in the second digit.
TWO_RANKS = 8 * EPS[torch.float32]

# A mean loss of a few hundred tokens, or its gradients over their largest entry, added up in another order in float32.
SAME_LOSS = 8 * EPS[torch.float32]

# Muon's orthogonalisation works in bfloat16, so that a last bit of a gradient summed over ranks can turn one of its
# roundings; cut over ranks it adds in another order besides. One rounding of an update, times
# the learning rate (4e-3), a few steps.
MUON_SHARDED = 0.05 * EPS[torch.bfloat16]


# Logits of one tiny float32 model by two routes (padded or alone, cached or not, another attention kernel), near 1 in
# size: some eighty roundings.
SAME_LOGITS = 1e-5


def step_bound(dtype: torch.dtype, dim: int) -> float:
    """Error of one step over the RMS of the row, arithmetic in ``dtype``: 4 eps sqrt(d), for ``alpha |u| <= |x|``.

    Beyond that it grows with ``alpha |u| / |x|`` for any formula, since v cannot be known better than u's rounding.
    """
    return 4 * EPS[dtype] * math.sqrt(dim)


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of ``dtype`` at each value: twice the largest rounding error there."""
    exponent = torch.frexp(value.double()).exponent - 1
    smallest = math.log2(torch.finfo(dtype).tiny)
    return EPS[dtype] * torch.exp2(exponent.double().clamp_min(smallest))


def worst(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest wanted entry (or 1)."""
    got, want = torch.as_tensor(got).detach().double(), torch.as_tensor(want).detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    if want.numel() == 0:
        return 0.0
    error = (got - want).abs().max()
    return math.inf if error.isnan() else float(error / max(1.0, float(want.abs().max())))
