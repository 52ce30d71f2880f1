"""What the tests cost, in CPU seconds of all their processes: other work on the machine changes wall time far more.

    python -m benchmarks.suite [--check] [PYTEST ARGUMENT ...]

Runs pytest with these arguments, then prints the CPU seconds of each folder and the 50 most expensive tests, of which
the ends of the names.

`--check` also fails if the suite costs more than `MARGIN` times `BUDGET`. The budget counts in calibrations, so that it
is the same on every machine: one calibration is the CPU seconds in which `calibrate` traces and compiles fixed
programs. It is measured while the tests run, since what shares the cores of a machine makes all CPU seconds longer.
"""

import collections
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGET = 290.0
"""Calibrations that the default suite may cost."""
MARGIN = 1.4
"""How much more it may cost. What else uses the machine's memory slows the tests more than a calibration, whose process
is small: the same tests cost from 340 to 375 calibrations within hours on one machine."""
CALIBRATION_PAUSE = 60.0
"""Seconds between two calibrations."""
FOLDER_VARIABLE = "JAXINFER_SUITE_FOLDER"
"""The environment variable that names the folder for the rows of each process."""
SHOWN = 50
CALIBRATION_FLAGS = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""As tests compile today. They stay when tests change theirs, or one calibration would be another unit."""


def cpu_seconds() -> float:
    """Compute the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write what a test, with the fixtures that it is the first to use, costs."""
    begin = cpu_seconds()
    result = yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with open(Path(os.environ[FOLDER_VARIABLE], f"{worker}.jsonl"), "a") as rows:
        rows.write(json.dumps({"test": item.nodeid, "cpu": cpu_seconds() - begin}) + "\n")
    return result


def calibrate() -> None:
    """Trace and compile programs like those of the tests. Its process is what is measured."""
    import jax
    import jax.numpy as jnp

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        scores = jax.nn.softmax(y @ y.T)
        return x + jax.nn.silu(scores @ (y @ w)) * jnp.argsort(x, axis=-1)[:, ::-1].astype(x.dtype)

    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(6):
            x = layer(x, w)
        return jax.lax.fori_loop(0, 3, lambda _, x: layer(x, w), x)

    for rows in range(1, 7):
        jax.jit(model).lower(jnp.ones((rows, 16)), jnp.ones((16, 16))).compile()


def calibration() -> float:
    """Measure the CPU seconds of a calibration."""
    command = [sys.executable, "-c", "from benchmarks.suite import calibrate; calibrate()"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": CALIBRATION_FLAGS}
    begin = cpu_seconds()
    subprocess.run(command, env=environment, check=True)
    return cpu_seconds() - begin


def run_tests(command: list[str], folder: str, *, calibrates: bool) -> tuple[int, float, list[float]]:
    """Return the exit status of the tests, their CPU seconds, and those of each calibration meanwhile."""
    begin, calibrations = cpu_seconds(), []
    with subprocess.Popen(command, env=os.environ | {FOLDER_VARIABLE: folder}) as tests:
        while True:
            try:
                status = tests.wait(CALIBRATION_PAUSE if calibrates else None)
                break
            except subprocess.TimeoutExpired:
                calibrations.append(calibration())
    return status, cpu_seconds() - begin - sum(calibrations), calibrations


def report(rows: list[dict[str, Any]], total: float) -> None:
    """Print the CPU seconds of folders and of the most expensive tests."""
    folders: collections.Counter[str] = collections.Counter()
    for row in rows:
        folders[str(Path(row["test"].partition("::")[0]).parent)] += row["cpu"]
    print(f"\n{total:8.0f} CPU s: {len(rows)} tests, with starting and collecting in every process")
    for folder, seconds in folders.most_common():
        print(f"{seconds:8.1f} CPU s  {folder}")
    print(f"\nThe {SHOWN} most expensive tests, with the fixtures that they are the first to use:")
    for row in sorted(rows, key=lambda row: -row["cpu"])[:SHOWN]:
        print(f"{row['cpu']:8.1f} CPU s  {row['test'][-64:]}")


def main(arguments: list[str]) -> int:
    """Run the tests, and print what they cost. Returns the exit status."""
    checks = "--check" in arguments
    arguments = [argument for argument in arguments if argument != "--check"]
    with tempfile.TemporaryDirectory(prefix="jaxinfer-suite-") as folder:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite", *arguments]
        status, total, calibrations = run_tests(command, folder, calibrates=checks)
        rows = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    if status and checks:  # the failures stay in sight
        return status
    report(rows, total)
    if not checks:
        return status
    one = statistics.mean(calibrations or [calibration()])
    cost, limit = total / one, MARGIN * BUDGET
    print(f"\nThe tests cost {cost:.0f} calibrations of {one:.1f} CPU s. At most {limit:.0f} are allowed.")
    if cost > limit:
        print("Make the new tests cheaper (shared engines, fewer programs, smaller models), or mark them slow.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
