"""Errors of every kernel, and of its fallback on the same device, against float64 on the CPU."""

import collections
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu import cases
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.kernel_cases import Case
from jaxinfer.pallas_kernels.dispatch import without_kernels


def items(context: Context) -> list[Item]:
    """List the checked cases, in turns by operation, so that the first ones reach all kernels."""
    checked = in_turns(cases.tiny() if context.dry else cases.checked())
    return [Item(case.title, functools.partial(measure, context.rows, case, seed)) for seed, case in enumerate(checked)]


def in_turns(cases: Iterable[Case]) -> list[Case]:
    """Order cases so that each operation has one before any has the next."""
    turns: collections.Counter[str] = collections.Counter()
    numbered = []
    for case in cases:
        numbered.append((turns[case.op], case))
        turns[case.op] += 1
    return [case for _, case in sorted(numbered, key=lambda pair: pair[0])]


def measure(rows: Rows, case: Case, seed: int) -> None:
    """Report the errors of a case, and whether its kernel ran; None: it is known to have none."""
    error, fallback_error = errors(case, seed)
    kernel = runs_kernel(case) if case.kernels else None
    columns = {"error": error, "fallback_error": fallback_error, "tolerance": case.tolerance}
    rows.row(part="numerics", op=case.op, case=case.name, kernel=kernel, **columns)


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
