import pathlib
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.models.files.conversion import convert
from tests.goldens.expected import read_expected

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


def _run(*arguments: object):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same model, stored in every dtype."""
    path = tmp_path_factory.mktemp("verify")
    convert(GOLDENS / "llama_llama3", path / "float32")
    convert(GOLDENS / "llama_llama3", path / "bfloat16", dtype="bfloat16")
    for quantize in ("int8", "int4", "fp8"):
        convert(GOLDENS / "llama_llama3", path / quantize, quantize=quantize)
    return path


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4", "fp8"])
def test_agrees_with_its_source(models, stored):
    done = _run(models / stored, "--reference", GOLDENS / "llama_llama3")
    assert done.exit_code == 0, done.output
    assert re.search(r"sha256 of \d+ files: matches manifest.json\n15 tensors, max abs diff", done.stdout)
    assert ("diff 0\n" in done.stdout) == (stored == "float32")


@pytest.mark.parametrize(
    "stored", ["float32", *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in ("bfloat16", "int8", "fp8")), "int4"]
)
def test_agrees_with_logits(models, stored, tmp_path):
    save_file(read_expected(GOLDENS / "llama_llama3"), tmp_path / "expected.safetensors")
    done = _run(models / stored, "--reference", tmp_path / "expected.safetensors")
    assert done.exit_code == 0, done.output
    assert re.search(r"KL \S+ nats/token, top-1 agreement", done.stdout)


def test_logits_of_unpadded_rows(models, tmp_path):
    expected = read_expected(GOLDENS / "llama_llama3")
    first = int(expected["lengths"][0])
    full = {"input_ids": expected["tokens"][:1, :first], "logits": expected["logits"][None, :first]}
    save_file({name: np.ascontiguousarray(array) for name, array in full.items()}, tmp_path / "full.safetensors")
    assert _run(models / "float32", "--reference", tmp_path / "full.safetensors").exit_code == 0


def test_encoders(tmp_path):
    convert(GOLDENS / "bert_awkward", tmp_path / "model")
    save_file(read_expected(GOLDENS / "bert_awkward"), tmp_path / "expected.safetensors")
    done = _run(tmp_path / "model", "--reference", tmp_path / "expected.safetensors")
    assert done.exit_code == 0, done.output
    assert "KL" not in done.stdout


def test_finds_other_weights(models, tmp_path):
    other = tmp_path / "hf"
    shutil.copytree(GOLDENS / "llama_llama3", other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name][3, 4] += 0.5
    save_file(tensors, other / "model.safetensors")
    for stored in ("float32", "int8", "fp8"):
        done = _run(models / stored, "--reference", other)
        assert done.exit_code == 1
        assert "these tensors differ by more than rounding: layers.0.mlp.down.weight" in done.stderr


def test_finds_other_logits(models, tmp_path):
    expected = read_expected(GOLDENS / "llama_llama3")
    expected["logits"][5, 6] += 0.01
    save_file(expected, tmp_path / "other.safetensors")
    done = _run(models / "float32", "--reference", tmp_path / "other.safetensors")
    assert done.exit_code == 1
    assert "max abs diff 0.01 (allowed 0.001)" in done.stdout
    assert _run(models / "float32", "--reference", tmp_path / "other.safetensors", "--atol", 0.02).exit_code == 0


def test_finds_damage(models, tmp_path):
    copy = pathlib.Path(shutil.copytree(models / "float32", tmp_path / "model"))
    assert _run(copy).exit_code == 0
    content = bytearray((copy / "config.json").read_bytes())
    content[-2] = ord(" ")
    (copy / "config.json").write_bytes(content)
    done = _run(copy)
    assert done.exit_code == 2
    assert "sha256 differs from manifest.json: config.json" in done.stderr


def test_refusals(models, tmp_path):
    model = models / "float32"
    assert "describes another model" in _run(model, "--reference", GOLDENS / "gpt2_tied").stderr
    assert "no such file" in _run(model, "--reference", tmp_path / "none").stderr
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    assert "truncated or corrupt" in _run(model, "--reference", tmp_path / "bad.safetensors").stderr
    save_file({"tokens": np.zeros((1, 2), np.int32)}, tmp_path / "half.safetensors")
    assert "needs tokens (or input_ids) and logits" in _run(model, "--reference", tmp_path / "half.safetensors").stderr
    shapes = {"tokens": np.zeros((1, 2), np.int32), "logits": np.zeros((2, 5), np.float32)}
    save_file(shapes, tmp_path / "shape.safetensors")
    assert "[2, 5] do not fit the model's [2, 64]" in _run(model, "--reference", tmp_path / "shape.safetensors").stderr
