"""Layer-wise step sizes: how far each layer may move the stream."""

from __future__ import annotations

import math

from geonorm.errors import check_count, check_positive, unknown

DECAYS = {
    "harmonic": lambda k, total: 1 / k,
    "sqrt": lambda k, total: 1 / math.sqrt(k),
    # The paper's (T - k)/T counts layers from 0. Counted from 1 it would give the last layer a step of 0, and with
    # it no gradient at all.
    "linear": lambda k, total: (total - k + 1) / total,
    "none": lambda k, total: 1.0,
}


def step_sizes(decay: str, alpha: float, num_layers: int) -> list[float]:
    """Step size alpha_k of every layer k = 1..T (arXiv 2601.22095, section on layer-wise decay).

    Args:
        decay: ``"harmonic"`` alpha/k, ``"sqrt"`` alpha/sqrt(k), ``"linear"`` alpha (T-k+1)/T, ``"none"`` alpha.
        alpha: step size of the first layer, positive.
        num_layers: T, at least 1.

    Returns:
        T positive numbers, largest first; no entry is zero.

    Raises:
        UserError: unknown decay, alpha not positive, or fewer than one layer.
    """
    if decay not in list(DECAYS):
        raise unknown("decay", decay, DECAYS)
    alpha = check_positive("alpha", alpha)
    num_layers = check_count("num_layers", num_layers)
    law = DECAYS[decay]
    return [alpha * law(k, num_layers) for k in range(1, num_layers + 1)]
