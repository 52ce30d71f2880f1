"""Errors of every kernel, and of its fallback on the same device, against float64 on the CPU."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.clock import Clock
from benchmarks.kernel_cases import Case
from benchmarks.report import Report
from jaxinfer.pallas_kernels.dispatch import without_kernels


def measure(report: Report, clock: Clock, cases: Iterable[Case]) -> None:
    """Report every case, and check that all errors are within their tolerances."""
    cases = list(cases)
    worst, done = 0.0, 0
    for seed, case in enumerate(clock.affordable(cases)):
        kernel, fallback = errors(case, seed)
        columns = {"error": kernel, "fallback_error": fallback, "tolerance": case.tolerance}
        worst = max(worst, kernel / case.tolerance)
        report.row(part="numerics", op=case.op, case=case.name, kernel=runs_kernel(case), **columns)
        print(f"numerics: {case.title}: {kernel:.1e} (fallback {fallback:.1e}) of {case.tolerance:g}", flush=True)
        done = seed + 1
    for case in cases[done:]:
        report.row(part="numerics", op=case.op, case=case.name, absent="no time left; see --minutes")
    report.check("worst_error_of_tolerance", worst, "", target=1.0, better="lower")


def errors(case: Case, seed: int = 0) -> tuple[float, float]:
    """Compute the largest relative errors of the kernel and of the fallback, against float64."""
    args = case.make(jax.random.key(seed))
    expected = expected_of(case, args)
    kernel = error_of(case, args, expected)
    with without_kernels():
        return kernel, error_of(case, args, expected)


def runs_kernel(case: Case) -> bool:
    """Check whether the operation runs its kernel here, not its fallback. Always True in a dry run."""
    lowered = jax.jit(lambda *args: case.call(*args)).lower(*case.args)
    return jax.default_backend() != "gpu" or "mosaic_gpu" in lowered.as_text()


def expected_of(case: Case, args: tuple[Any, ...]) -> list[np.ndarray]:
    """Compute the results in float64."""
    return _leaves(case.reference(*jax.device_get(args)))


def error_of(case: Case, args: tuple[Any, ...], expected: list[np.ndarray]) -> float:
    """Compute the largest relative error of a case's results."""
    actual = jax.device_get(jax.jit(lambda *args: case.compared(case.call(*args), *args))(*args))
    return max(map(error, _leaves(actual), expected))


_OUTLIER = 8
"""Factor by which a single element's relative error may exceed the norm's.

Errors of correct sums are about normal, and of 10^9 none is expected to exceed 6 standard deviations.
"""


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Compute the relative error of a result; infinite if any element is not finite.

    For integers it is the fraction that differs. For floats the larger of two: |actual - expected| / |expected| in the
    Frobenius norm; and, since a single wrong element changes that little, an element's largest error relative to itself
    plus the root mean square of all, divided by _OUTLIER.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if np.issubdtype(expected.dtype, np.integer):
        return float(np.mean(actual != expected))
    actual = actual.astype(np.float64)
    if not np.isfinite(actual).all():
        return np.inf
    difference, root_mean_square = abs(actual - expected), max(np.sqrt(np.mean(expected**2)), 1e-30)
    of_an_element = np.max(difference / (abs(expected) + root_mean_square)) / _OUTLIER
    return float(max(np.sqrt(np.mean(difference**2)) / root_mean_square, of_an_element))


def _leaves(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
