"""Every kernel against float64 on the CPU, and its definition on the same device beside it."""

from collections.abc import Iterable
from typing import Any

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
        found = {"error": ours, "definition": definition, "most": case.tolerance}
        worst = max(worst, ours / case.tolerance)
        report.row(part="numerics", op=case.op, case=case.name, kernel=runs_kernel(case), **found)
        print(f"numerics: {case.title}: {ours:.1e} (definition {definition:.1e}) of {case.tolerance:g}", flush=True)
        done = seed + 1
    for case in cases[done:]:
        report.row(part="numerics", op=case.op, case=case.name, absent="no time left; see --minutes")
    report.check("worst_error_of_tolerance", worst, "", target=1.0, better="lower")


def errors(case: Case, seed: int = 0) -> tuple[float, float]:
    """The largest relative errors of the kernel and of the definition, against float64."""
    args = case.make(jax.random.key(seed))
    expected = expected_of(case, args)
    ours = error_of(case, args, expected)
    with without_kernels():
        return ours, error_of(case, args, expected)


def runs_kernel(case: Case) -> bool:
    """Whether the operation is a kernel here, or its definition because the kernel refuses; True in a dry run."""
    lowered = jax.jit(lambda *args: case.call(*args)).lower(*case.shapes)
    return jax.default_backend() != "gpu" or "mosaic_gpu" in lowered.as_text()


def expected_of(case: Case, args: tuple[Any, ...]) -> list[np.ndarray]:
    """The results in float64."""
    assert case.reference is not None
    return _leaves(case.reference(*jax.device_get(args)))


def error_of(case: Case, args: tuple[Any, ...], expected: list[np.ndarray]) -> float:
    """The largest relative error of a case's results."""
    found = jax.device_get(jax.jit(lambda *args: case.call(*args))(*args))
    return max(map(error, _leaves(found), expected))


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
