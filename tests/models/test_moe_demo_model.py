"""The committed demo model with experts: what it writes, how well it predicts, and what its one file has."""

import pathlib
import sysconfig

import jax.numpy as jnp
import pytest
from flax import nnx
from tokenizers import Tokenizer

from examples.train_demo_model import encode, model_bits
from examples.train_moe_demo_model import CONFIG, route
from jaxinfer.checkpoints import read_file, read_manifest
from jaxinfer.models.files.loading import load_model
from tests.models import goldens

DEMO = pathlib.Path(__file__).parents[2] / "examples/moe_demo_model"
HELD_OUT = ("queue.py", "bisect.py")
PROMPTS = (
    "    def test_read(self):\n        with open(self.path) as f:\n",
    "class MyError(Exception):\n    def __init__(self, message):\n",
)
TEXTS = (
    "            f.write('\\n')\n        self.assertEqual(f.read(), '\\n')\n        self.assertEqual(f.read(), '",
    f"{3 * '        self.message = message\n'}        self.",
)
TOKENS = [
    [277, 290, 993, 358, *[60, 78, 407, 260, 271, 338, 526, 980, 631, 284] * 2],
    [*[260, 271, 14, 1345, 279, 1255, 199] * 3, 260, 271, 14],
]


@pytest.fixture(scope="module")
def loaded():
    return load_model(DEMO, dtype="float32")


@pytest.fixture(scope="module")
def model(loaded):
    return nnx.merge(loaded.graphdef, loaded.state)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str((read_file(DEMO, "tokenizer.json") or b"").decode())


@pytest.fixture(scope="module")
def texts():
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    return [(library / name).read_text() for name in HELD_OUT]


def test_the_same_texts(loaded, tokenizer):
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert goldens.greedy_after(loaded.graphdef, loaded.state, prompts, TOKENS) == TOKENS
    assert tuple(map(tokenizer.decode, TOKENS)) == TEXTS


@pytest.mark.slow
def test_bits_per_byte_of_held_out_modules(model, tokenizer, texts):
    bits = sum(model_bits(model, tokenizer, text) for text in texts)
    assert bits / sum(len(text.encode()) for text in texts) < 1.2  # 1.10 when it was made


@pytest.mark.slow
def test_every_expert_is_used(model, tokenizer, texts):
    tokens = encode(tokenizer, texts)[:1024].reshape(2, 512)
    load = route(model, jnp.asarray(tokens)).load
    assert load.shape == (6, 8)
    assert 0.02 < load.min() < load.max() < 0.4  # 0.125 is even


def test_one_file_has_it_all():
    (file,) = DEMO.iterdir()
    assert file.stat().st_size <= 8_000_000
    manifest = read_manifest(DEMO)
    assert manifest.leaves["layers.5.mlp.experts.gate_up.weight"].dtype == "bfloat16"
    assert manifest.leaves["layers.5.mlp.router.weight"].dtype == "float32"
    assert load_model(DEMO).config == CONFIG
