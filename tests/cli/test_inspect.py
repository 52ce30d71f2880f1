"""`jaxinfer inspect` as a user runs it."""

import dataclasses
import re

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.models.files.description import Description
from jaxinfer.models.presets import preset


def model_directory(folder):
    """A model directory of GPT-J-6B with two layers, without weights."""
    config = dataclasses.replace(preset("gpt-j-6b"), layers=2)
    (folder / "config.json").write_bytes(Description(family="gptj", config=config, dtype="bfloat16").to_json())
    return str(folder)


@pytest.mark.aot
def test_inspect_reports_on_a_model_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    result = CliRunner().invoke(app, ["inspect", model_directory(tmp_path), "--context", "256"])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("│", " ").split()) for line in result.output.splitlines()]
    assert "CUDA graphs 1, and no launches outside" in lines
    assert any(re.match(r"written in place (\d+) of \1 donated arrays", line) for line in lines)
    assert any(re.fullmatch(r"decode_attention_kernel \S+ 32 128 [1-9]\d\d,\d{3}", line) for line in lines)
    assert "kernels per layer 5" in lines
    assert any(re.fullmatch(r"outside the layers 13 in a greedy pass, \d+ more in a step", line) for line in lines)
    assert any(re.fullmatch(r"sample/draw/truncate [1-9]\d*", line) for line in lines)


@pytest.mark.aot
def test_inspect_reports_on_the_stages_of_a_pipeline(tmp_path):
    options = ["--mesh", "pipeline=2,tensor=2", "--context", "256", "--batch", "4"]
    result = CliRunner().invoke(app, ["inspect", model_directory(tmp_path), *options])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("│", " ").split()) for line in result.output.splitlines()]
    assert "decode of 16 passes, batch 4, 256 tokens; 2 stages of 1, 1 layers, 2 micro-batches" in " ".join(lines)
    assert "CUDA graphs 1, and no launches outside" in lines
    for line in (
        "all-reduce first_stage/psum bf16[2,1,4096] 2 1 16,384",
        "all-gather last_stage/sample/all_gather s32[2,2,2] 2 1 16",
        "all-reduce mlp/psum bf16[2,1,4096] 2 1 16,384",
        "collective-permute ppermute bf16[2,1,4096] 2 1 16,384",
        "collective-permute ppermute s32[2,2,1] 2 1 16",
        "all-reduce psum, once a step s32[4,17] 2 1 272",
    ):
        assert line in lines
    asked = [line.split()[0] for line in lines if re.fullmatch(r"last_stage/sample\S* \d+", line)]
    assert "last_stage/sample/draw/truncate" in asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "pipeline=3"], "mesh pipeline=3: the model has 2 layers, fewer than stages"),
        (["--target", "h2000"], "Unknown target 'h2000'"),
        (["--context", "4096"], "--context 4096 is more than the model's 2048"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_inspect_refuses(tmp_path, options, message):
    result = CliRunner().invoke(app, ["inspect", model_directory(tmp_path), *options])
    assert result.exit_code == 2
    assert message in result.output
