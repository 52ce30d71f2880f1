"""`pip-install`, with which the Makefile sets up: little output, pip's own in a log, and pip's exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "pip-install"

PIP = """\
import sys
assert sys.argv[1:4] == ["-m", "pip", "--disable-pip-version-check"], sys.argv
print("WARNING: Retrying (Retry(total=4))", file=sys.stderr)
print("Collecting jax<0.13,>=0.11 (from jaxinfer==0.1.0)")
print("  Downloading jax-0.11.2-py3-none-any.whl (3.0 MB)")
print("Processing /wheels/einops-0.8.2-py3-none-any.whl")
if "broken" in sys.argv:
    sys.exit("ERROR: No matching distribution found for broken")
print("Installing collected packages: einops, jax")
print("Successfully installed einops-0.8.2 jax-0.11.2")
"""


@pytest.fixture
def install(tmp_path):
    """Runs the script in an environment whose python prints what pip might."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pip.py").write_text(PIP)
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "pip.py"} "$@"\n')
    python.chmod(0o755)
    return lambda *arguments: subprocess.run([SCRIPT, tmp_path, *arguments], capture_output=True, text=True)


def test_packages_are_shown_and_the_rest_is_logged(install, tmp_path):
    done = install("jax")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Installing into {tmp_path}: jax einops; installing; 2 installed\n"
    log = (tmp_path / "pip.log").read_text()
    assert log.startswith("\n+ pip install jax\n")
    assert "WARNING: Retrying" in log
    assert "  Downloading jax" in log


def test_a_failure_keeps_its_status_and_shows_the_end_of_the_log(install, tmp_path):
    done = install("broken")
    assert done.returncode == 1
    assert "ERROR: No matching distribution found for broken\n" in done.stderr
    assert done.stderr.endswith(f"pip failed. This was the end of {tmp_path / 'pip.log'}.\n")
