"""Every kernel against float64 on the CPU, and its definition on the same device beside it."""

from collections.abc import Iterable

import jax
import numpy as np

from benchmarks.gpu.cases import Case
from benchmarks.gpu.clock import Clock
from benchmarks.report import Report
from pallas_kernels.dispatch import without_kernels


def measure(report: Report, clock: Clock, cases: Iterable[Case]) -> None:
    """A row for every case, and a check that all errors are within their tolerances."""
    cases = list(cases)
    worst, done = 0.0, 0
    for seed, case in enumerate(clock.affordable(cases)):
        ours, definition = errors(case, seed)
        worst = max(worst, ours / case.tolerance)
        report.row(part="numerics", op=case.op, case=case.name, error=ours, definition=definition, most=case.tolerance)
        print(f"numerics: {case.title}: {ours:.1e} (definition {definition:.1e}) of {case.tolerance:g}", flush=True)
        done = seed + 1
    for case in cases[done:]:
        report.row(part="numerics", op=case.op, case=case.name, absent="no time left; see --minutes")
    report.check("worst_error_of_tolerance", worst, "", target=1.0, better="lower")


def errors(case: Case, seed: int = 0) -> tuple[float, float]:
    """The largest relative errors of the kernel and of the definition, against float64."""
    args = case.make(jax.random.key(seed))
    expected = _leaves(case.reference(*jax.device_get(args)))
    found = jax.device_get(jax.jit(lambda *args: case.call(*args))(*args))
    with without_kernels():
        defined = jax.device_get(jax.jit(lambda *args: case.call(*args))(*args))
    return tuple(max(map(error, _leaves(one), expected)) for one in (found, defined))  # type: ignore[return-value]


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Integers: the share that differs. Others: |found - expected| / |expected|, infinite where a number is none."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if np.issubdtype(expected.dtype, np.integer):
        return float(np.mean(found != expected))
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        return np.inf
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def _leaves(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
