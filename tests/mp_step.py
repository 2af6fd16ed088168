"""The step and its gradients in 50-digit arithmetic, from the definition alone: no series, no analytic derivative."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import lru_cache

import mpmath
from mpmath import mpf

RETRACTIONS = ("exponential", "projection", "cayley", 0.7, 3.0)


def angle_of(t: mpf, retraction: str | float) -> mpf:
    """phi(t) as the table of retractions defines it."""
    if retraction == "exponential":
        return t
    p = {"projection": 1, "cayley": 2}.get(retraction, retraction)
    return p * mpmath.atan(t / p)


def step(x, u, alpha, retraction, max_angle=None, radius=None):
    """One row: y from the definition."""
    ux, xx = sum(map(mpmath.fmul, u, x)), sum(a * a for a in x)
    w = [alpha * (b - ux / xx * a) for a, b in zip(x, u, strict=True)]
    length = mpmath.sqrt(xx)
    t = mpmath.sqrt(sum(a * a for a in w)) / length
    theta = angle_of(t, retraction)
    if max_angle is not None:
        theta = min(theta, mpf(max_angle))
    ratio = mpmath.sin(theta) / t if t else mpf(1)
    resize = 1 if radius is None else radius / length
    return [resize * (mpmath.cos(theta) * a + ratio * b) for a, b in zip(x, w, strict=True)]


def gradients(x, u, alpha, g, retraction, max_angle=None, radius=None):
    """Gradients of <g, y> by x, u and alpha: central differences, whose error at 80 digits is far below 50."""
    flat, n, h = [*x, *u, alpha], len(x), mpf(10) ** -26

    def value(z):
        return sum(map(mpmath.fmul, g, step(z[:n], z[n:-1], z[-1], retraction, max_angle, radius)))

    slopes = []
    for i in range(len(flat)):
        ahead, behind = list(flat), list(flat)
        ahead[i] += h
        behind[i] -= h
        slopes.append((value(ahead) - value(behind)) / (2 * h))
    return slopes[:n], slopes[n:-1], slopes[-1]


@dataclasses.dataclass(frozen=True)
class Row:
    """One reference row, rounded to float64."""

    retraction: str | float
    regime: str
    alpha: float
    max_angle: float | None
    radius: float | None
    x: list[float]
    u: list[float]
    grad_y: list[float]
    y: list[float]
    grad_x: list[float]
    grad_u: list[float]
    grad_alpha: float

    def __str__(self) -> str:
        return f"{self.retraction}-{self.regime}-{self.radius}"


def _update(regime: str, x: list[float], noise: list[float]) -> list[float]:
    scale = {"tiny": 1e-9, "series": 0.1, "moderate": 0.8, "large": 6.0, "clamped": 3.0}
    if regime == "zero":
        return [0.0] * len(x)
    if regime == "parallel":
        return [2.0 * a for a in x]
    if regime == "nearly parallel":
        return [-1.5 * a + 1e-6 * b for a, b in zip(x, noise, strict=True)]
    return [scale[regime] * b for b in noise]


REGIMES = ("zero", "parallel", "nearly parallel", "tiny", "series", "moderate", "large", "clamped")


@lru_cache(maxsize=1)
def own_table(dim: int = 5) -> tuple[Row, ...]:
    """The reference rows that need nothing outside this folder."""
    draw = random.Random(20260122)
    rows = []
    with mpmath.workdps(80):
        for retraction, regime, radius in itertools.product(RETRACTIONS, REGIMES, (None, 2.5)):
            x, noise, g = ([draw.gauss(0, 1) for _ in range(dim)] for _ in range(3))
            u, alpha = _update(regime, x, noise), draw.choice([0.25, 1.0, 1.7])
            limit = math.pi / 8 if regime == "clamped" else None
            exact = [[mpf(a) for a in vector] for vector in (x, u, g)]
            arguments = (retraction, limit, radius)
            y = step(exact[0], exact[1], mpf(alpha), *arguments)
            by_x, by_u, by_alpha = gradients(exact[0], exact[1], mpf(alpha), exact[2], *arguments)
            rows.append(
                Row(
                    retraction, regime, alpha, limit, radius, x, u, g,
                    *([float(a) for a in vector] for vector in (y, by_x, by_u)),
                    float(by_alpha),
                )
            )  # fmt: skip
    return tuple(rows)
