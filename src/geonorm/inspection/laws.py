"""Laws of decay along the depth, fitted to measured angles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from geonorm.errors import UserError, check_count
from geonorm.schedules import DECAYS

POWER = "power"
LAWS = ("none", "harmonic", "sqrt", "linear", POWER)


@dataclasses.dataclass(frozen=True)
class LawFit:
    """One law, fitted by least squares of the logarithm, so that every layer counts by its relative error.

    Attributes:
        law: ``"none"`` a, ``"harmonic"`` a/k, ``"sqrt"`` a/sqrt(k), ``"linear"`` a (T-k+1)/T, ``"power"`` a k^-p.
        scale: a, in the unit of the values.
        exponent: p of the power law (negative where values grow with depth), else None.
        exponent_error: its standard error, else None.
        error: typical relative error of the fit: ``exp(rms of log residuals) - 1``.
        held_out: the same over points that were left out of the fit in turn. A law with more freedom fits its own
            points better; here it does so only if it foresees the others better too.
    """

    law: str
    scale: float
    exponent: float | None
    exponent_error: float | None
    error: float
    held_out: float

    def at(self, layer: float, num_layers: int) -> float:
        """Value of the fitted law at a layer."""
        return self.scale * _factor(self.law, self.exponent, layer, num_layers)


@dataclasses.dataclass(frozen=True)
class LawFits:
    """All laws on one set of points.

    Attributes:
        fits: one a law, in the order of :data:`LAWS`; empty where there are fewer than three points.
        best: name of the law with the least held-out error, or None.
        num_points: points that were fitted.
        num_left_out: points whose value was zero, or no number: no law with a logarithm can hold them.
    """

    fits: tuple[LawFit, ...]
    best: str | None
    num_points: int
    num_left_out: int

    def fit(self, law: str) -> LawFit:
        """The fit of one law."""
        return next(fit for fit in self.fits if fit.law == law)


def fit_laws(layers: Sequence[int], values: Sequence[float], num_layers: int) -> LawFits:
    """Fit every law of decay to positive values by layer.

    Args:
        layers: layer of each point, counted from 1; a layer may occur more than once.
        values: as many values, such as angles in radians.
        num_layers: T, the depth of the model.

    Raises:
        UserError: different numbers of layers and values, or a layer outside ``1..num_layers``.
    """
    check_count("num_layers", num_layers)
    if len(layers) != len(values):
        raise UserError(f"`layers` and `values` must be equally many, got {len(layers)} and {len(values)}")
    if any(not 1 <= layer <= num_layers for layer in layers):
        raise UserError(f"`layers` must lie in 1..{num_layers}, got {min(layers)}..{max(layers)}")
    kept = [(layer, value) for layer, value in zip(layers, values, strict=True) if 0 < value < math.inf]
    left_out = len(layers) - len(kept)
    # Two points leave nothing to judge a power law by: it goes through both.
    if len(kept) < 3 or len({layer for layer, _ in kept}) < 2:
        return LawFits((), None, len(kept), left_out)
    k = np.array([layer for layer, _ in kept], dtype=float)
    logs = np.log([value for _, value in kept])
    fits = tuple(_fit(law, k, logs, num_layers) for law in LAWS)
    best = min((fit for fit in fits if math.isfinite(fit.held_out)), key=lambda fit: fit.held_out)
    return LawFits(fits, best.law, len(kept), left_out)


def _factor(law: str, exponent: float | None, layer: float, num_layers: int) -> float:
    return layer**-exponent if exponent is not None else DECAYS[law](layer, num_layers)


def _fit(law: str, k: np.ndarray, logs: np.ndarray, num_layers: int) -> LawFit:
    count = len(k)
    if law == POWER:
        distance = np.log(k) - np.log(k).mean()
        sum_of_squares = float((distance**2).sum())
        slope = float(distance @ logs) / sum_of_squares
        scale = float(logs.mean() - slope * np.log(k).mean())
        residuals = logs - (scale + slope * np.log(k))
        exponent, deviation = -slope, math.sqrt(float((residuals**2).sum()) / (count - 2) / sum_of_squares)
        leverage = 1 / count + distance**2 / sum_of_squares
    else:
        exponent = deviation = None
        shape = np.log([DECAYS[law](layer, num_layers) for layer in k])
        scale = float((logs - shape).mean())
        residuals = logs - shape - scale
        leverage = np.full(count, 1 / count)
    # The residual of a point left out of a linear fit, without fitting again; a leverage of 1 fixes its own point.
    alone = leverage > 1 - 1e-9
    left_out = residuals / np.where(alone, np.nan, 1 - leverage)
    held_out = math.inf if alone.any() else _typical(left_out)
    return LawFit(law, math.exp(scale), exponent, deviation, _typical(residuals), held_out)


def _typical(residuals: np.ndarray) -> float:
    return float(np.expm1(np.sqrt(np.mean(residuals**2))))
