import os
import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxinfer import LLM
from jaxinfer.cli import app
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.layer_folders import layer_folder

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "llama_llama3"


def _run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_converts(tmp_path):
    done = _run("convert", GOLDEN, tmp_path / "model", "--quantize", "int8")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'model'}: llama decoder, int8\n"
    assert (tmp_path / "model" / "manifest.json").exists()


def test_converts_to_one_file(tmp_path):
    done = _run("convert", GOLDEN, tmp_path / "model", "--layout", "single-file")
    assert done.exit_code == 0, done.output
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["checkpoint.safetensors"]
    assert "llama (decoder)" in _run("info", tmp_path / "model").stdout
    verified = _run("verify", tmp_path / "model", "--reference", GOLDEN)
    assert verified.exit_code == 0, verified.output
    assert "sha256 of 16 files: matches manifest.json\n15 tensors, max abs diff 0\n" in verified.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GOLDEN.parent / "none", "model"), "error: {goldens}/none: no such directory; name one with config.json"),
        (
            (GOLDEN.parents[2] / "examples/demo_model", "model"),
            "demo_model: a model directory already, which every command takes as it is; to store it in another format",
        ),
        ((GOLDEN, "."), "not empty; name another output directory"),
        ((GOLDEN, "model", "--dtype", "int4"), "error: dtype='int4' is not implemented; known: float32"),
        ((GOLDEN, "model", "--quantize", "int3"), "error: quantize='int3' is not implemented; known: int8"),
        ((GOLDEN, "model", "--layout", "zip"), "error: --layout must be orbax, single-file or streaming, got 'zip'"),
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


MESH = '[mesh]\ntensor = 2\n[rules]\nvocab = []\n[memory]\nweights = "disk"\nlayer_files = "layers"\n'


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--quantize", "int8", "--dtype", "float16"], {"quantize": "int8", "dtype": "float16"}),
        (["--mesh", "tensor=2"], {"mesh": MeshConfig(tensor=2)}),
        (["--mesh", "mesh.toml"], {"mesh": "mesh.toml"}),
        (["--layer-files", "there"], {"layer_files": "there"}),
    ],
)
def test_the_layers_are_those_that_a_run_reads(tmp_path, monkeypatch, arguments, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mesh.toml").write_text(MESH)
    done = _run("convert", GOLDEN, "model", "--layout", "streaming", *arguments)
    assert done.exit_code == 0, done.output
    (written,) = tmp_path.rglob("layers.json")
    assert f"{written.parent}: layer files, for runs in " in done.stdout
    files = {file: file.stat().st_ino for file in tmp_path.rglob("*")}
    LLM("model", weights="disk", max_batch=1, token_budget=8, chunk_size=8, **options)
    assert {file: file.stat().st_ino for file in tmp_path.rglob("*")} == files


def test_layers_for_a_mesh_that_is_not_here_are_written_by_the_cpu(tmp_path):
    """A process of one device; the layers are those of two."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = ["convert", GOLDEN, tmp_path / "model", "--layout", "streaming", "--mesh", "tensor=2"]
    done = subprocess.run(
        [sys.executable, "-c", "from jaxinfer.cli import app; app()", *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert layer_folder(open_model(tmp_path / "model", mesh=MeshConfig(tensor=2))).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "tensor=2"], "--mesh needs --layout streaming: add it"),
        (["--layer-files", "there"], "--layer-files needs --layout streaming: add it"),
        (["--layout", "streaming", "--mesh", "tensor=99"], "needs 99 devices"),
        (
            ["--layout", "streaming", "--mesh", "data=2"],
            "--mesh data=2: streaming layers with data parallelism is not implemented; set data = 1.",
        ),
        (["--layout", "streaming", "--mesh", "bad.toml"], "[memory]: unknown field 'weigths'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_converted(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[memory]\nweigths = 1\n")
    done = _run("convert", GOLDEN, "model", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "model").exists()


def test_experts_are_not_written_for_several_devices(tmp_path):
    mixture = GOLDEN.parent / "mixtral_plain"
    done = _run("convert", mixture, tmp_path / "model", "--layout", "streaming", "--mesh", "expert=2")
    assert done.exit_code == 2
    assert "--mesh expert=2: streaming experts to several devices is not implemented" in done.stderr
    assert not (tmp_path / "model").exists()


def test_help_imports_no_jax():
    code = (
        "import sys; from jaxinfer.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("convert", "info", "verify"))
