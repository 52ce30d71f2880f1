"""Fits the constants of systems to the paper's points: the largest relative error becomes as small as it can."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.deepspeed_figures.points import Point
from jaxinfer.sharding.planner import System

SHARE = (0.2, 0.95)
"""Bounds of shares of a peak; seconds are positive."""
LONGEST = 0.01
LEAST = 1e-3
"""Below a nanosecond, a constant is 0."""
NORMS = (1, 2, 4, 6)
"""Powers of the errors whose squares are minimised, one after the other: the last one is near to the maximum."""
BEGINNING = {"bandwidth_share": 0.7, "flops_share": 0.7, "layer_s": 1e-4, "token_s": 2e-7}
OTHER_S = 1e-5
"""Seconds with which the other constants begin."""


def fit(system: System, points: Sequence[Point]) -> System:
    """Fit the constants that `system.fitted` names, and round them to three digits."""
    beginning = [BEGINNING.get(name, OTHER_S) for name in system.fitted]
    made = _descend(system, points, beginning, NORMS)
    worst = max(abs(point.error(made)) for point in points)
    return dataclasses.replace(made, error=float(f"{worst:.2g}"))


def left_out(system: System, points: Sequence[Point]) -> list[float]:
    """Return the error of each point by constants that are fitted to all others, beginning with those of all."""
    beginning, made = [getattr(system, name) for name in system.fitted], []
    for point in points:
        others = [other for other in points if other is not point]
        made.append(point.error(_descend(system, others, beginning, NORMS[1:])))
    return made


def _descend(system: System, points: Sequence[Point], beginning: Sequence[float], norms: Sequence[int]) -> System:
    names = system.fitted
    shares = np.array([name.endswith("_share") for name in names])
    scales = np.where(shares, 1.0, 1e-6)
    lower = np.where(shares, SHARE[0], 0.0)
    upper = np.where(shares, SHARE[1], LONGEST / scales)

    def made(values: np.ndarray) -> System:
        return dataclasses.replace(system, **dict(zip(names, (values * scales).tolist(), strict=True)))

    def residuals(values: np.ndarray, power: int) -> np.ndarray:
        with_values = made(values)
        # Tenths, so that powers stay near 1.
        errors = 10 * np.array([math.log(point.predicted(with_values) / point.seconds) for point in points])
        return np.sign(errors) * np.abs(errors) ** power

    values = np.array(beginning) / scales
    for power in norms:
        start = np.clip(values, lower + 1e-6, upper - 1e-6)
        scale = np.maximum(start, 0.1)
        values = least_squares(residuals, start, bounds=(lower, upper), x_scale=scale, args=(power,)).x
    return made(np.array([float(f"{value:.2e}") if value > LEAST else 0.0 for value in values]))
