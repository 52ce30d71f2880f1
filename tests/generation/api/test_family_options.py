"""What some families alone have, through the whole engine: against transformers, and against the model without a cache.

GPT-2 with scores scaled layer by layer; OPT-350m's post-norm blocks between projections of narrower embeddings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.lora.peft import read_adapter
from jaxinfer.models.abstract import leaf_name
from jaxinfer.models.files.conversion import convert
from tests.models import goldens
from tests.peft import random_pair, save_adapter

NAMES = {
    "gpt2_inverse_layers": ("transformer.h.2.attn.c_attn", 72),
    "opt_projected": ("model.decoder.layers.1.fc1", 40),
}
"""Golden -> a projection of its last layer, and its outputs."""


@pytest.fixture(scope="module", params=["gpt2_inverse_layers", "opt_projected"])
def golden(request):
    return request.param, goldens.load(request.param)


@pytest.fixture(scope="module")
def adapter(golden, tmp_path_factory):
    name, _ = golden
    module, outputs = NAMES[name]
    pair = random_pair(outputs, 24, 2, np.random.default_rng(0))
    folder = tmp_path_factory.mktemp("adapters") / name
    return save_adapter(folder, {module: pair}, fan_in_fan_out=name.startswith("gpt2"))


@pytest.fixture(scope="module")
def llm(golden, adapter, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / golden[0]
    convert(goldens.DIRECTORY / golden[0], path)
    return LLM(path, max_batch=1, token_budget=8, chunk_size=8, adapters={"adapter": adapter})


@pytest.fixture(scope="module")
def reference(llm, adapter):
    """Hidden vectors [T, W] and log probabilities [T, V] at every position of a text, without a cache."""
    graphdef = llm.model.graphdef

    @jax.jit
    def run(state, ids, positions):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(ids, positions)
        return hidden[0], model.logits(hidden)[0]

    layers = read_adapter(adapter, llm.model.description.family, llm.model.config).layers
    state = dict(nnx.to_flat_state(llm.model.state))
    merged = {
        path: variable.replace(variable[...] + layers[name].b @ layers[name].a)
        for path, variable in state.items()
        if (name := leaf_name(path).removesuffix(".weight")) in layers
    }
    states = {None: llm.model.state, "adapter": nnx.from_flat_state(state | merged)}

    def reference(ids, adapter=None):
        places = jnp.arange(24)
        padded = jnp.pad(jnp.asarray(ids), (0, 24 - len(ids)))
        hidden, logits = run(states[adapter], padded[None], jnp.where(places < len(ids), places, -1)[None])
        return np.asarray(hidden[: len(ids)]), log_softmax(np.asarray(logits[: len(ids)]), axis=-1)

    return reference


def prompts_of(golden):
    lengths = (golden.positions >= 0).sum(axis=1)
    return [row[:length].tolist() for row, length in zip(golden.tokens, lengths, strict=True)]


@pytest.mark.slow
def test_prompts_have_transformers_probabilities(llm, golden):
    prompts = prompts_of(golden[1])
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=0))
    expected = np.split(log_softmax(golden[1].expected, axis=-1), np.cumsum([len(prompt) for prompt in prompts])[:-1])
    for prompt, output, rows in zip(prompts, outputs, expected, strict=True):
        (chosen,) = output.outputs[0].logprobs
        found = [entry.logprob for entry in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(found, rows[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
        np.testing.assert_allclose(chosen.logprob, rows[-1].max(), atol=1e-4)


@pytest.mark.slow
def test_decoding_continues_as_without_a_cache(llm, golden, reference):
    prompts = prompts_of(golden[1])[1:]
    names = [None, "adapter"]
    params = [SamplingParams(temperature=0, max_tokens=12, logprobs=0, adapter=name) for name in names]
    texts = []
    for output, name in zip(llm.generate(prompts, params), names, strict=True):
        completion, start = output.outputs[0], len(output.prompt_token_ids) - 1
        _, rows = reference(output.prompt_token_ids + completion.token_ids, name)
        chosen = rows[start:-1]
        assert completion.token_ids == chosen.argmax(axis=1).tolist()
        np.testing.assert_allclose([e.logprob for e in completion.logprobs], chosen.max(axis=1), atol=1e-4)
        texts.append(rows)
    _, plain = reference(prompts[1])
    assert np.abs(texts[1][: len(prompts[1])] - plain).max() > 1e-2  # the adapter does something


@pytest.mark.slow
def test_vectors_are_means_of_what_leaves_the_model(llm, golden, reference):
    prompts = prompts_of(golden[1])
    vectors = llm.embed(prompts)
    assert vectors.shape == (3, golden[1].config.output_width)
    for prompt, vector in zip(prompts, vectors, strict=True):
        mean = reference(prompt)[0].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_longrope_goes_by_the_engine_s_context(tmp_path):
    convert(goldens.DIRECTORY / "phi3_longrope", tmp_path / "phi3")
    for context, longer in ((None, True), (8, False)):  # trained on 8
        with LLM(tmp_path / "phi3", context=context, max_batch=1, token_budget=8, chunk_size=8) as llm:
            assert llm.model.config.layer(0).attention.positions.scaling.longer is longer
