"""XLA:CPU's fusions under the flags of a user's process: none that gives garbage, and the right numbers.

The flags that tests compile with (`conftest.py`) change what is fused.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled.fusions import garbled_products, ynn_fusions

ROOT = Path(__file__).parents[2]
OF_TESTS = (
    "JAX_ENABLE_PREEMPTION_SERVICE",
    "JAX_NUM_CPU_DEVICES",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT",
    "NPROC",
    "XLA_FLAGS",
)
"""The variables that `conftest.py` sets and a user's process does not have."""

CLI = "from jaxinfer.cli import app; app()"
SHORT = ("generate", "examples/demo_model", "--prompt", "def main():", "--max-tokens", "12")

SERVICE = """
import numpy as np
from jaxinfer.elastic import Service

with Service.from_checkpoint("benchmarks/data/elastic_vit_tiny", merge_levels=(-4,), max_batch=2) as service:
    images = np.zeros((2, service.config.image_size, service.config.image_size, 3), np.uint8)
    for level in service.levels:
        print(level, service.classify(images, "digits", level=level))
"""
EMBEDDER = "from jaxinfer import Embedder; print(Embedder('examples/demo_model', level=0).embed('def main():').shape)"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command as a user's process, with nothing compiled before, for its output."""

    def run(command, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
        environment |= {"JAX_PLATFORMS": "cpu", "JAXINFER_CACHE": str(tmp_path / "cache")} | variables
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def modules(run, tmp_path):
    """Return a function that runs a command for what is compiled in its process, name -> optimised HLO.

    Without the library of CPU kernels, which leaves XLA less to fuse, unless `library` is "".
    """

    def modules(command, library="0"):
        folder = tmp_path / "modules"
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        assert run(command, XLA_FLAGS=flags, JAXINFER_CPU_LIBRARY=library)
        return {file.name: file.read_text() for file in folder.glob("*.cpu_after_optimizations.txt")}

    return modules


def demo():
    """Return the command of `make demo`, for this interpreter."""
    make = ["make", "--dry-run", "--no-print-directory", "demo"]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    _, name, arguments = made.stdout.partition(".venv/bin/jaxinfer ")
    assert name
    return ["bash", "-c", f'exec "$0" -c "{CLI}" {arguments}', sys.executable]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "fewest"), [("0", 11), ("", 1)], ids=["XLA alone", "kernels"])
def test_no_program_of_the_demo_reduces_a_product_with_a_broadcast_scalar(modules, library, fewest):
    programs = modules(demo(), library)
    assert len(programs) >= 4  # to admit a request, to copy pages, prefill, decode
    fusions = {name: len(ynn_fusions(hlo)) for name, hlo in programs.items()}
    assert sum(count >= fewest for count in fusions.values()) == 2, fusions  # prefill, decode
    assert not any(garbled_products(hlo) for hlo in programs.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (CLI, *SHORT, "--dtype", "bfloat16"),
        (CLI, *SHORT, "--quantize", "int8", "--kv-dtype", "int8"),
        (CLI, *SHORT, "--quantize", "fp8"),
        (CLI, *SHORT, "--num-speculative-tokens", "3", "--temperature", "0", "--logprobs", "2"),
        (EMBEDDER,),
        (SERVICE,),
    ],
    ids=["bfloat16", "int8", "fp8", "speculation", "embedder", "elastic"],
)
def test_no_other_program_does(modules, arguments):
    programs = modules([sys.executable, "-c", *arguments])
    assert any(ynn_fusions(hlo) for hlo in programs.values())
    assert not any(garbled_products(hlo) for hlo in programs.values())


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["demo", "others"])
def test_operations_with_fusions_and_without_are_their_references(run, cases):
    outcomes = json.loads(run([sys.executable, "-m", "tests.compiled.cpu_operations", cases]))
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome["garbled_products"]
        or not max(outcome["error"], outcome["error_without_fusions"]) <= outcome["tolerance"]
    }
    assert not wrong
    assert sum(outcome["fusions"] for outcome in outcomes.values()) > len(outcomes)
    assert any(outcome["reduced_products"] for outcome in outcomes.values())  # by the softmax after them
    assert not any(outcome["fusions_without"] for outcome in outcomes.values())


def test_a_product_with_a_broadcast_scalar_that_is_reduced_is_found(run):
    controls = json.loads(run([sys.executable, "-m", "tests.compiled.cpu_operations", "controls"]))
    flagged = {name for name, outcome in controls.items() if outcome["garbled_products"]}
    assert flagged == {"scalar on the right", "scalar, exponential", "argument on the right"}
    reduced = {name for name, outcome in controls.items() if outcome["reduced_products"]}
    assert controls.keys() - reduced == {"not reduced"}
    for name, outcome in controls.items():
        assert outcome["error_without_fusions"] <= outcome["tolerance"], name
        assert name in flagged or outcome["error"] <= outcome["tolerance"], name
    if max(controls[name]["error"] for name in flagged) <= max(outcome["tolerance"] for outcome in controls.values()):
        pytest.skip("On this processor YNNPACK multiplies by a broadcast scalar rightly.")
