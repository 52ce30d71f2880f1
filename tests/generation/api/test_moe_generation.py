"""Mixtures of experts through the engine: all that dense models can, and where their tokens went."""

import dataclasses
import re

import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.compiled import Costs
from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.api.beam_search import BeamSearchParams
from jaxinfer.generation.lora.peft import read_adapter
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.models.abstract import leaf_name
from tests.generation import moe_by_hand
from tests.generation.conftest import PAGE_BYTES
from tests.generation.few_programs import few_programs
from tests.generation.sampled import SIZES
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, MOE_CONFIGS, save_tiny

OPTIONS = {**SIZES, "context": 64, "page_size": 8, "max_decode_passes": 4, "expert_load": True}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (19, 3)]


@pytest.fixture(scope="session")
def moe_dirs(tmp_path_factory):
    """Model directories of `MOE_CONFIGS`."""
    base = tmp_path_factory.mktemp("moe")
    return {name: save_tiny(base / name, config=config) for name, config in MOE_CONFIGS.items()}


@pytest.fixture(scope="module")
def moe_llm(moe_dirs):
    """Room for 10 pages: two requests that grow to the context do not fit together."""
    with few_programs():
        return LLM(moe_dirs["shared"], cache_bytes=10 * PAGE_BYTES // 2, **OPTIONS)


@pytest.fixture(scope="module")
def by_hand(moe_llm):
    """The logits, experts and vector of a text, by `moe_llm`'s weights."""
    return by_hand_of(moe_llm.model)


def by_hand_of(model, adapter=None):
    state = dict(nnx.to_flat_state(model.state))
    for path, variable in state.items():
        if adapter is not None and (pair := adapter.layers.get(leaf_name(path).removesuffix(".weight"))):
            state[path] = variable.replace(variable[...] + pair.b @ pair.a)
    decoder = nnx.merge(model.graphdef, nnx.from_flat_state(state))
    return lambda ids: moe_by_hand.forward(decoder, ids)


def check_greedy(by_hand, output):
    """The tokens are those by hand, and the experts too; returns the choices of experts that were computed."""
    (completion,), prompt = output.outputs, output.prompt_token_ids
    logits, experts, _ = by_hand([*prompt, *completion.token_ids[:-1]])
    assert completion.token_ids == logits[len(prompt) - 1 :].argmax(axis=1).tolist()
    computed = np.moveaxis(experts[output.num_cached_tokens :], 1, 0)
    load, count = completion.expert_load, completion.expert_load.tokens.shape[1]
    np.testing.assert_array_equal(load.tokens, [np.bincount(layer.reshape(-1), minlength=count) for layer in computed])
    assert not load.dropped.any()
    assert not load.dropped_share.any()


def test_greedy_tokens_and_expert_loads_are_those_by_hand(moe_llm, by_hand):
    before = moe_llm.stats().expert_load
    outputs = moe_llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        check_greedy(by_hand, output)
    total = moe_llm.stats().expert_load.tokens - (0 if before is None else before.tokens)
    np.testing.assert_array_equal(total, sum(output.expert_load.tokens for output in outputs))
    load = outputs[0].expert_load
    np.testing.assert_allclose(load.imbalance, load.tokens.max(axis=1) * 4 / load.tokens.sum(axis=1))
    assert re.search(r"\nexperts +[\d,]+ choices of experts, imbalance \d\.\d\d$", str(moe_llm.stats()))


def test_what_the_prefix_cache_has_is_not_computed_again(moe_llm, by_hand):
    for cached in (0, 19):  # the last token is computed again: a token is chosen after it
        (output,) = moe_llm.generate([[9, *PROMPTS[0]]], GREEDY)
        assert output.num_cached_tokens == cached
        check_greedy(by_hand, output)


def test_a_row_does_not_depend_on_others_nor_on_a_preemption(moe_llm):
    params = dataclasses.replace(GREEDY, max_tokens=44)
    alone = [moe_llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]
    before = moe_llm.stats()
    together = moe_llm.generate(PROMPTS, params)
    assert moe_llm.stats().preemptions > before.preemptions
    assert [output.outputs[0].token_ids for output in together] == alone


def test_log_probabilities_stop_strings_and_vectors(moe_llm, by_hand):
    params = dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1)
    (output,), (vector,) = moe_llm.generate([PROMPTS[1]], params), moe_llm.embed([PROMPTS[1]])
    (completion,) = output.outputs
    ids = [*PROMPTS[1], *completion.token_ids]
    expected = log_softmax(by_hand(ids)[0], axis=1)[np.arange(len(ids) - 1), ids[1:]]
    found = [entry.logprob for entry in (*output.prompt_logprobs[1:], *completion.logprobs)]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(vector, by_hand(PROMPTS[1])[2], atol=1e-4)
    stop = completion.text[2:4]
    (stopped,) = moe_llm.generate([PROMPTS[1]], dataclasses.replace(GREEDY, stop=(stop,)))
    assert stopped.outputs[0].text == completion.text[: completion.text.index(stop)]


def test_structured_outputs_and_beams(moe_llm, by_hand):
    structured = StructuredOutputsParams(regex="[a-f]{4}[0-9]")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, structured_outputs=structured)
    (output,) = moe_llm.generate([PROMPTS[1]], params)
    assert re.fullmatch("[a-f]{4}[0-9]", output.outputs[0].text)
    (found,) = moe_llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    for beam in found.beams:
        ids = [*PROMPTS[1], *beam.token_ids]
        scores = log_softmax(by_hand(ids[:-1])[0], axis=1)[np.arange(len(ids) - 1), ids[1:]]
        assert beam.cumulative_logprob == pytest.approx(scores[-4:].sum(), abs=1e-3)


@pytest.mark.slow
def test_speculation_changes_no_token(moe_dirs, moe_llm, monkeypatch):
    costs = Costs.fixed({("decode", (("batch", 1), ("speculative", count))): 0.001 for count in (0, 4)})
    monkeypatch.setattr("jaxinfer.generation.api.loading.engine_costs", lambda *key, **options: costs)
    llm = LLM(moe_dirs["shared"], **{**OPTIONS, "max_batch": 1, "num_speculative_tokens": 4, "max_decode_passes": 1})
    prompt, bias = [5, 6, 7, 8, 9] * 4, dict.fromkeys((5, 6, 7, 8, 9), 6.0)
    params = dataclasses.replace(GREEDY, max_tokens=40, logit_bias=bias)
    ((plain,), (speculated,)) = (some.generate([prompt], params) for some in (moe_llm, llm))
    (completion,) = speculated.outputs
    assert completion.token_ids == plain.outputs[0].token_ids
    assert completion.num_accepted_tokens > 10
    wrong = completion.num_draft_tokens - completion.num_accepted_tokens
    assert completion.expert_load.tokens.sum() == 2 * 2 * (len(prompt) + 39 + wrong)


@pytest.mark.slow
def test_adapters_change_attention_and_dense_layers(moe_dirs, tmp_path):
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.o_proj": (32, 32)}
    rng = np.random.default_rng(0)
    pairs = {
        f"model.layers.{i}.{module}": random_pair(*shape, 2, rng) for i in (0, 1) for module, shape in shapes.items()
    }
    pairs["model.layers.0.mlp.up_proj"] = random_pair(48, 32, 2, rng)
    folder = save_adapter(tmp_path / "adapter", pairs)
    llm = LLM(moe_dirs["sigmoid"], adapters={"some": folder}, **OPTIONS)
    for name in (None, "some"):
        (output,) = llm.generate([PROMPTS[0]], dataclasses.replace(GREEDY, adapter=name))
        adapter = None if name is None else read_adapter(folder, "tiny", llm.model.config)
        check_greedy(by_hand_of(llm.model, adapter), output)


@pytest.mark.parametrize("module", ["mlp.experts.0.up_proj", "mlp.gate", "mlp.shared_expert.down_proj", "mlp.up_proj"])
def test_adapters_of_experts_are_refused(tmp_path, module):
    pair = random_pair(24, 32, 2, np.random.default_rng(0))
    folder = save_adapter(tmp_path, {f"model.layers.1.{module}": pair})
    message = f"layers.1.{module} is not a linear of this model's 2 layers; .* without experts, routers"
    with pytest.raises(CheckpointError, match=message):
        read_adapter(folder, "tiny", MOE_CONFIGS["sigmoid"])


def test_a_capacity_drops_choices_and_counts_them(moe_dirs):
    """A prompt of one chunk: of its 16 choices each expert takes 4. No drop has changed what the first layer gets."""
    llm = LLM(moe_dirs["capacity"], **OPTIONS)
    prompt = PROMPTS[0][:8]
    (output,) = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=1))
    chosen = np.bincount(by_hand_of(llm.model)(prompt)[1][:, 0].reshape(-1), minlength=4)
    np.testing.assert_array_equal(output.expert_load.tokens[0], chosen)
    assert output.expert_load.dropped[0] == np.maximum(chosen - 4, 0).sum() > 0
    assert output.expert_load.dropped_share[0] == output.expert_load.dropped[0] / 16
    assert "% dropped" in str(llm.stats())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv_dtype": "int8"}, 0.2),
        ({"quantize": "int8"}, 0.3),
        ({"quantize": "int4"}, 1e-3),
        ({"quantize": "fp8"}, 1e-3),
    ],
    ids=str,
)
def test_quantised_experts_and_caches(tmp_path, options, tolerance):
    """Against the weights that the stored numbers mean; int8 rounds activations or keys and values as well."""
    moe = dataclasses.replace(MOE_CONFIGS["shared"].layer(0).mlp.moe, shared_hidden=128)
    config = dataclasses.replace(CONFIG.with_mlp(hidden=128, moe=moe), embed=128)
    llm = LLM(save_tiny(tmp_path / "wide", config=config), **OPTIONS, **options)
    (output,) = llm.generate([PROMPTS[0]], dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1))
    ids = [*PROMPTS[0], *output.outputs[0].token_ids]
    expected = log_softmax(by_hand_of(llm.model)(ids)[0], axis=1)[np.arange(len(ids) - 1), ids[1:]]
    found = [entry.logprob for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
    np.testing.assert_allclose(np.median(np.abs(np.subtract(found, expected))), 0, atol=tolerance)


def test_expert_load_is_refused_where_there_is_none(model_dir, moe_dirs, tmp_path):
    with pytest.raises(ValueError, match=r"LLM\.expert_load=True is for a mixture of experts, and tiny is dense"):
        LLM(model_dir, expert_load=True)
    with pytest.raises(ValueError, match="expert_load=True needs all weights on the devices"):
        LLM(moe_dirs["shared"], expert_load=True, weights="host")
    two, four = MOE_CONFIGS["shared"].layer(0).mlp, MOE_CONFIGS["sigmoid"].layer(1).mlp
    mixed = save_tiny(tmp_path / "mixed", config=CONFIG.with_mlps((two, four)))
    with pytest.raises(ValueError, match=r"mixed has layers of 4, 8; leave it out"):
        LLM(mixed, expert_load=True)
