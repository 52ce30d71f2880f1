import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "llama_llama3"


def _run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_converts(tmp_path):
    done = _run("convert", GOLDEN, tmp_path / "model", "--quantize", "int8")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'model'}: llama decoder, int8\n"
    assert (tmp_path / "model" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GOLDEN.parent / "none", "model"), "error: {goldens}/none: no such directory; name one with config.json"),
        ((GOLDEN, "."), "not empty; name another output directory"),
        ((GOLDEN, "model", "--dtype", "int4"), "error: dtype='int4' is not implemented; known: float32"),
        ((GOLDEN, "model", "--quantize", "int3"), "error: quantize='int3' is not implemented; known: int8"),
        ((GOLDEN, "file/model"), "error: "),
    ],
)
def test_errors_are_one_line_and_status_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = _run("convert", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert message.format(goldens=GOLDEN.parent) in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_help_imports_no_jax():
    code = (
        "import sys; from jaxinfer.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("convert", "info", "verify"))
