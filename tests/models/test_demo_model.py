"""The committed demo model: its tokens and its leaf names stay what they were when it was made."""

import pathlib

import pytest
from flax import nnx
from tokenizers import Tokenizer

from jaxinfer.checkpoints import read_file, read_manifest
from jaxinfer.models.files.loading import load_model, save_model
from tests.models import goldens

DEMO = pathlib.Path(__file__).parents[2] / "examples/demo_model"
PROMPTS = ["import os\n", "def fibonacci(n):\n    "]
LINES = ([598, 550, 199] * 11)[:32]
EXPECTED = {
    None: [
        LINES,
        [
            *(384, 304, 88, 493, 259, 384, 304, 2011, 527, 690, 484, 3358, 79, 563, 1073, 286),
            *(259, 384, 304, 2011, 527, 690, 484, 3358, 79, 563, 1073, 286, 259, 384, 304, 2011),
        ],
    ],
    "int8": [
        LINES,
        [
            *(384, 221, 16, 199, 259, 384, 221, 16, 327, 527, 690, 63, 1623, 2989, 1073, 286),
            *(259, 384, 221, 16, 327, 527, 690, 63, 1623, 2989, 1073, 286, 259, 384, 221, 16),
        ],
    ],
}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_same_tokens(quantize):
    model = load_model(DEMO, dtype="float32", quantize=quantize)
    tokenizer = Tokenizer.from_str((read_file(DEMO, "tokenizer.json") or b"").decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert goldens.greedy_after(model.graphdef, model.state, prompts, EXPECTED[quantize]) == EXPECTED[quantize]


def test_the_same_leaf_names(tmp_path):
    model = load_model(DEMO)
    save_model(tmp_path / "model", nnx.merge(model.graphdef, model.state), family="demo")
    leaves = read_manifest(tmp_path / "model").leaves
    assert leaves.keys() == read_manifest(DEMO).leaves.keys()
    assert {name for name in leaves if name.startswith("layers.0.")} == {
        "layers.0.attention.out.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.attention_norm.scale",
        "layers.0.mlp.down.weight",
        "layers.0.mlp.gate_up.weight",
        "layers.0.mlp_norm.scale",
    }
