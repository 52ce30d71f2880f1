"""The examples run as README describes: on the demo model where its text matters, else on a smaller one."""

import asyncio
import functools
import json
import pathlib
import re

import numpy as np
import pytest

from examples import async_generate, batch_generate, embed, generate, generate_on_mesh, stream_weights
from jaxinfer import LLM

ROOT = pathlib.Path(__file__).parents[2]
DEMO = str(ROOT / "examples/demo_model")


@pytest.mark.slow
def test_generate(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(generate, "LLM", functools.partial(LLM, max_batch=1))  # few programs to compile
    texts = generate.run(str(model_dir), max_tokens=8)
    assert len(texts) == 3
    streamed = capsys.readouterr().out.split("A stream:\n")[1]
    assert streamed == texts[0] + "\n"


@pytest.mark.slow
def test_batch_generate(capsys):
    found = batch_generate.run(DEMO, max_batch=1)
    cached = [output.num_cached_tokens for output in found["prefix"]]
    assert cached[0] == 0
    assert min(cached[1:]) > 50
    assert len({completion.text for completion in found["samples"].outputs}) == 3
    texts = {name: found[name].outputs[0].text for name in ("schema", "regex", "stop")}
    assert json.loads(texts["schema"]).keys() == batch_generate.SCHEMA["properties"].keys()
    assert re.fullmatch(batch_generate.ASSIGNMENT, texts["regex"])
    assert texts["stop"]
    assert "\n" not in texts["stop"]
    ids = found["processor"].outputs[0].token_ids
    assert len(set(ids)) == len(ids) == batch_generate.WINDOW
    *usual, urgent = [output.outputs[0].timings.first_token_s for output in found["priority"]]
    assert urgent <= min(usual)
    speculated = found["speculation"].outputs[0]
    assert 0 < speculated.num_accepted_tokens <= speculated.num_draft_tokens
    best, second = found["beams"].beams
    assert best.score >= second.score
    assert "speculative tokens were accepted" in capsys.readouterr().out


@pytest.mark.slow
def test_async_generate(model_dir, capsys):
    text, outputs = asyncio.run(async_generate.run(str(model_dir), max_tokens=8))
    assert text == outputs[0].outputs[0].text
    assert len(outputs) == len(async_generate.PROMPTS)
    printed = capsys.readouterr().out
    assert printed.startswith(f"A stream:\n{text}\n")
    assert "given up after" in printed


@pytest.mark.slow
def test_stream_weights(capsys, monkeypatch):
    monkeypatch.setattr(stream_weights, "PROMPTS", stream_weights.PROMPTS[:1])  # few programs to compile
    before = {file for file in (ROOT / "examples").rglob("*") if "__pycache__" not in file.parts}
    texts = stream_weights.run(DEMO, "disk", None, max_tokens=4)
    printed = capsys.readouterr().out
    assert "layers: 8 on disk" in printed
    assert all(text in printed for text in texts)
    assert before == {file for file in (ROOT / "examples").rglob("*") if "__pycache__" not in file.parts}


@pytest.mark.slow
def test_generate_on_mesh(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(generate_on_mesh, "PROMPTS", ["import os\n"])  # few programs to compile
    on_mesh, alone = generate_on_mesh.run(str(model_dir), str(ROOT / "examples/mesh.toml"), max_tokens=8)
    assert on_mesh == alone
    assert "on 2 devices" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["cheapest", "pcc"])
def test_generate_with_experts_on_a_mesh(tmp_path, capsys, exchange):
    text = (ROOT / "examples/moe_mesh.toml").read_text().replace("cheapest", exchange)
    (tmp_path / "mesh.toml").write_text(text)
    on_mesh, alone = generate_on_mesh.run(
        str(ROOT / "examples/moe_demo_model"), str(tmp_path / "mesh.toml"), max_tokens=24
    )
    assert on_mesh == alone
    assert len(on_mesh) == 2
    assert "on 8 devices" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pipeline = 2\n", "pipeline = 2\ntensor = 2\n"])
def test_generate_in_stages(tmp_path, capsys, mesh):
    (tmp_path / "mesh.toml").write_text(f"[mesh]\n{mesh}")
    model = str(ROOT / "examples/demo_model")
    on_mesh, alone = generate_on_mesh.run(model, str(tmp_path / "mesh.toml"), max_tokens=24)
    assert on_mesh == alone
    printed = capsys.readouterr().out
    assert "2 stages of " in printed
    assert "stages were idle for " in printed


@pytest.mark.slow
def test_generate_in_lanes(model_dir, tmp_path, capsys):
    (tmp_path / "mesh.toml").write_text("[mesh]\ndata = 2\n")
    on_mesh, alone = generate_on_mesh.run(str(model_dir), str(tmp_path / "mesh.toml"), max_tokens=24)
    assert on_mesh == alone
    assert "on 2 devices" in capsys.readouterr().out


@pytest.mark.slow
def test_embed_agrees_with_transformers(tmp_path):
    """Needs PyPI. The reference is what `embed.REFERENCE` printed under torch 2.13 and transformers 5.23."""
    vectors = embed.run(tmp_path)
    reference = np.array(json.loads((ROOT / "tests/goldens/all-MiniLM-L6-v2.json").read_text()))
    assert (vectors * reference).sum(axis=1).min() > 0.9999
