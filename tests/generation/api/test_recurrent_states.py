"""Models whose layers have a recurrent state for each sequence, next to layers with attention."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.lora.peft import read_adapter
from jaxinfer.models.abstract import leaf_name
from jaxinfer.sharding import MeshConfig
from tests.generation.few_programs import few_programs
from tests.generation.sampled import PROMPTS, generate, logprob_errors
from tests.peft import random_pair, save_adapter
from tests.tiny import HYBRID, random_model, save_tiny

SIZES = {"max_batch": 2, "token_budget": 16, "chunk_size": 8, "page_size": 16}
"""Of an engine that runs two chunks of a prompt in a step, and takes snapshots after multiples of two chunks."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = [[(7 * i + n) % 256 for i in range(n)] for n in (1, 63, 64, 65, 113)]
REPEATING = dataclasses.replace(GREEDY, max_tokens=40, logit_bias=dict.fromkeys((5, 6, 7, 8, 9), 6.0))
"""Of texts in which an n-gram proposer is right often, but not always."""
TO_REPEAT = [[5, 6, 7, 8, 9] * 4, [7] * 12, [3, 1, 4, *[5] * 6], [9]]
WINDOW = 3
EQUIPMENT = {"num_speculative_tokens": WINDOW, "max_decode_passes": 4, "max_adapters": 2, "max_lora_rank": 4}
"""Of an engine that speculates, and has room for adapters."""
LINEARS = {
    "linear_attn.in_proj_qkv": (56, 32),
    "linear_attn.in_proj_z": (24, 32),
    "linear_attn.in_proj_a": (4, 32),
    "linear_attn.in_proj_b": (4, 32),
    "linear_attn.out_proj": (32, 24),
    "self_attn.q_proj": (64, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
ADAPTERS = {"all": (3, tuple(LINEARS)), "steps": (2, ("linear_attn.in_proj_a",)), "gate": (4, ("self_attn.q_proj",))}
"""Adapters: their rank, and the linears that they change where a layer has them."""
WAYS = {
    "streamed": {"weights": "disk", "max_decode_passes": 1},
    "tensor": {"mesh": MeshConfig(tensor=2)},
    "lanes": {"mesh": MeshConfig(data=2)},
    "stages": {"mesh": MeshConfig(pipeline=2)},
    "int8 KV": {"kv_dtype": "int8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose linears have Qwen3.5's names in adapters."""
    return save_tiny(tmp_path_factory.mktemp("models") / "hybrid", config=HYBRID, family="qwen3_5")


@pytest.fixture(scope="module")
def whole(folder):
    with few_programs():
        return LLM(folder, **SIZES | {"token_budget": 8})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    base, rng = tmp_path_factory.mktemp("adapters"), np.random.default_rng(0)

    def pairs(rank, names):
        for layer in range(HYBRID.layers):
            mixer = "self_attn" if HYBRID.layer(layer).has_attention else "linear_attn"
            for name in names:
                if name.startswith((mixer, "mlp")):
                    yield f"model.language_model.layers.{layer}.{name}", random_pair(*LINEARS[name], rank, rng)

    return {name: save_adapter(base / name, dict(pairs(*what))) for name, what in ADAPTERS.items()}


@pytest.fixture(scope="module")
def equipped(folder, adapters):
    with few_programs():
        return LLM(folder, adapters=adapters, **SIZES | {"token_budget": 8} | EQUIPMENT)


@pytest.fixture
def pays(monkeypatch):
    """Speculation pays, however long its passes take."""
    monkeypatch.setattr(PassCosts, "ratio", lambda self, rows: 1.0)


@nnx.jit
def scores_of(model, tokens):
    """The log probabilities of the token after each one, without a cache."""
    return jax.nn.log_softmax(model.logits(model(tokens, np.indices(tokens.shape, np.int32)[1])[0]))


def check_logprobs(outputs, model):
    """The log probabilities of prompts and of what follows are those that the model gives to whole texts."""
    tokens = np.zeros((len(LONG), HYBRID.context), np.int32)
    for row, output in zip(tokens, outputs, strict=False):
        text = output.prompt_token_ids + output.outputs[0].token_ids
        row[: len(text)] = text
    for row, expected, output in zip(tokens, np.asarray(scores_of(model, tokens)), outputs, strict=False):
        found = [token.logprob for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
        np.testing.assert_allclose(found, expected[np.arange(len(found)), row[1 : len(found) + 1]], atol=1e-3)


def test_chunks_and_single_tokens_give_what_whole_texts_do(whole):
    """In chunks of eight tokens, while others decode."""
    check_logprobs(
        whole.generate(LONG, dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0)), random_model(HYBRID)
    )


def test_states_are_reserved(whole, equipped):
    delta = HYBRID.layer(0).mixer
    holdings = [held for budget in equipped.budgets.values() for held in budget.holdings]  # of both
    window = 1 + WINDOW * (delta.key_heads * delta.features + 2 * delta.value_heads)
    rows = 2 + 1 + whole.engine.config.num_snapshots
    slots = [held.bytes // (2 * rows * 4) for held in holdings if held.tenant == "recurrent states"]
    assert sorted(slots) == [delta.state_values, delta.state_values + window]
    assert whole.memory.page_bytes == equipped.memory.page_bytes == 16 * HYBRID.layer(1).attention.kv_values * 4


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(whole, equipped, pays, sampling):
    """Rows decode beside others' prompts, with all, some and none of their guesses right."""
    params = dataclasses.replace(REPEATING, **sampling)
    before = equipped.stats()
    assert generate(equipped, params, TO_REPEAT) == generate(whole, params, TO_REPEAT)
    after = equipped.stats()
    right, all_guesses = after.accepted_tokens - before.accepted_tokens, after.draft_tokens - before.draft_tokens
    assert 0 < right < all_guesses
    equipped.engine.scheduler.check_integrity()


def test_adapters_are_as_if_merged_into_the_weights(equipped, adapters, pays):
    """In one batch, with speculation."""
    names = [*adapters, None]
    params = [dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0, adapter=name) for name in names]
    outputs = equipped.generate([TO_REPEAT[0]] * len(names), params)
    for name, output in zip(names, outputs, strict=True):
        check_logprobs([output], merged(adapters.get(name)))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(names)


def merged(adapter):
    """The model with an adapter added to its weights."""
    model = random_model(HYBRID)
    layers = read_adapter(adapter, "qwen3_5", HYBRID).layers if adapter else {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if (change := layers.get(leaf_name(path).removesuffix(".weight"))) is not None:
            variable.set_value(variable.get_value() + change.b @ change.a)
    return model


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


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "int8 KV"])
def test_speculation_and_adapters_in_every_way(folder, adapters, whole, equipped, pays, way):
    budget = {"token_budget": 32 if way == "stages" else 8}  # of one size of steps
    with few_programs():
        llm = LLM(folder, adapters=adapters, **SIZES | budget | EQUIPMENT | WAYS[way])
    assert generate(llm, REPEATING, TO_REPEAT) == generate(whole, REPEATING, TO_REPEAT)
    assert llm.stats().accepted_tokens > 0
    for name in adapters:
        params = dataclasses.replace(REPEATING, adapter=name)
        assert generate(llm, params, TO_REPEAT) == generate(equipped, params, TO_REPEAT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload": "1MiB", "weights": "disk"}, "kv_offload is not implemented for .* with recurrent states"),
        ({"mesh": MeshConfig(tensor=4)}, "the 2 key heads of a delta rule do not divide over 4 devices.*works is 2"),
    ],
)
def test_refusals(folder, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder, **SIZES | options)
