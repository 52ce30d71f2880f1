"""The examples run as README says, on the demo model."""

import json
import pathlib

import numpy as np
import pytest

from examples import embed, generate, generate_on_mesh

ROOT = pathlib.Path(__file__).parents[2]
DEMO = str(ROOT / "examples/demo_model")


def test_generate(capsys):
    texts = generate.run(DEMO, max_tokens=8)
    assert len(texts) == 3
    streamed = capsys.readouterr().out.split("A stream:\n")[1]
    assert streamed == texts[0] + "\n"


def test_generate_on_mesh(capsys):
    on_mesh, alone = generate_on_mesh.run(DEMO, str(ROOT / "examples/mesh.toml"), max_tokens=8)
    assert on_mesh == alone
    assert "on 2 devices" in capsys.readouterr().out


@pytest.mark.slow
def test_embed_agrees_with_transformers(tmp_path):
    """Needs PyPI. The reference is what `embed.REFERENCE` printed under torch 2.13 and transformers 5.23."""
    vectors = embed.run(tmp_path)
    reference = np.array(json.loads((ROOT / "tests/goldens/all-MiniLM-L6-v2.json").read_text()))
    assert (vectors * reference).sum(axis=1).min() > 0.9999
