"""Models whose layers have a recurrent state for each sequence, next to layers with attention."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.sharding import MeshConfig
from tests.generation.few_programs import few_programs
from tests.generation.sampled import PROMPTS, generate, logprob_errors
from tests.tiny import HYBRID, random_model, save_tiny

SIZES = {"max_batch": 2, "token_budget": 16, "chunk_size": 8, "page_size": 16}
"""Of an engine that runs two chunks of a prompt in a step, and takes snapshots after multiples of two chunks."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = [[(7 * i + n) % 256 for i in range(n)] for n in (1, 63, 64, 65, 113)]
WAYS = {
    "streamed": {"weights": "disk"},
    "tensor": {"mesh": MeshConfig(tensor=2)},
    "lanes": {"mesh": MeshConfig(data=2)},
    "stages": {"mesh": MeshConfig(pipeline=2)},
    "int8 KV": {"kv_dtype": "int8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "hybrid", config=HYBRID)


@pytest.fixture(scope="module")
def whole(folder):
    with few_programs():
        return LLM(folder, **SIZES | {"token_budget": 8})


def test_chunks_and_single_tokens_give_what_whole_texts_do(whole):
    """In chunks of eight tokens, while others decode."""
    outputs = whole.generate(LONG, dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0))
    model, tokens = random_model(HYBRID), np.zeros((len(LONG), HYBRID.context), np.int32)
    for row, prompt, output in zip(tokens, LONG, outputs, strict=True):
        row[: len(prompt) + 10] = prompt + output.outputs[0].token_ids
    positions = np.broadcast_to(np.arange(HYBRID.context, dtype=np.int32), tokens.shape)
    scores = nnx.jit(lambda model: jax.nn.log_softmax(model.logits(model(tokens, positions)[0])))(model)
    for row, expected, output in zip(tokens, np.asarray(scores), outputs, strict=True):
        found = [token.logprob for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
        np.testing.assert_allclose(found, expected[np.arange(len(found)), row[1 : len(found) + 1]], atol=1e-3)


def test_states_are_reserved(whole):
    held = {tenant.tenant: tenant.bytes for budget in whole.budgets.values() for tenant in budget.holdings}
    delta = HYBRID.layer(0).mixer
    assert held["recurrent states"] == 2 * (2 + 1 + whole.engine.config.num_snapshots) * delta.state_values * 4
    assert whole.memory.page_bytes == 16 * HYBRID.layer(1).attention.kv_values * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way(folder, whole, way):
    llm = LLM(folder, **SIZES, **WAYS[way])
    if way == "int8 KV":
        assert 0 < logprob_errors(llm, whole, GREEDY).max() < 0.1
        return
    for prompts in (PROMPTS, LONG):
        assert generate(llm, GREEDY, prompts) == generate(whole, GREEDY, prompts)
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv": "1MiB"}, r"host_kv=1048576 is not implemented for models with recurrent states.* layer 0: "),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens=3 is not implemented for models with recurrent states"),
        ({"mesh": MeshConfig(tensor=4)}, "the 2 key heads of a delta rule do not divide over 4 devices.*works is 2"),
    ],
)
def test_refusals(folder, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder, **SIZES | options)
