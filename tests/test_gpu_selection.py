"""`pytest -m gpu` on a machine whose packages are older: nothing that only the command line needs, and warnings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WARNS = "import warnings\n\ndef pytest_itemcollected(item):\n    warnings.warn('older', DeprecationWarning)\n"


@pytest.mark.slow
def test_gpu_tests_are_collected_without_a_command_line_and_despite_warnings(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('the command line was imported')\n")
    (tmp_path / "warns.py").write_text(WARNS)
    tests = ["tests/kernels/test_kernels_on_gpu.py", "tests/generation/api/test_gpu.py"]
    command = [sys.executable, "-m", "pytest", "-p", "warns", "-m", "gpu", "--collect-only", "-q", *tests]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("test_a_kernel_is_as_exact_as_its_dtype") > 100
    assert "test_a_gpu_generates_what_the_cpu_does" in done.stdout
