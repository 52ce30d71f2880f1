"""The committed demo model: its tokens and its leaf names stay what they were when it was made."""

import pathlib

import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints import read_manifest
from jaxinfer.models.files.loading import load_model, save_model

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


@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_the_same_tokens(quantize):
    llm = LLM(DEMO, dtype="float32", quantize=quantize, context=128, max_batch=1, token_budget=32)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
    assert [list(output.outputs[0].token_ids) for output in outputs] == EXPECTED[quantize]


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
