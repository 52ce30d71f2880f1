"""Requests with every sampling option, for tests that two ways of running a model give the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import SamplingParams, StructuredOutputsParams
from tests.tiny import CONFIG

SIZES = {"max_batch": 2, "token_budget": 8, "chunk_size": 8}
"""Of an engine of few programs: two of three prompts run beside each other, in chunks."""
PROMPTS = [list(range(20)), [7, 3, 250, 9], [5] * 9]

SAMPLED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "top_k": {"temperature": 1.5, "seed": 3, "top_k": 5},
    "top_k beyond the candidates": {"temperature": 3.0, "seed": 3, "top_k": 100},
    "top_p": {"temperature": 1.0, "seed": 4, "top_p": 0.7},
    "top_p beyond the candidates": {"temperature": 9.0, "seed": 4, "top_p": 0.95},
    "min_p": {"temperature": 2.0, "seed": 5, "min_p": 0.2},
    "all cuts": {"temperature": 2.0, "seed": 6, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"temperature": 0, "logit_bias": {250: 90.0, 3: -100.0}},
    "bad words": {"temperature": 0, "bad_words": [chr(a) + chr(b) for a in range(35, 51) for b in range(40, 56)]},
    "allowed tokens": {"temperature": 1.5, "seed": 9, "top_p": 0.9, "allowed_token_ids": range(5, 256, 3)},
    "min_tokens": {"temperature": 0, "min_tokens": 6, "stop_token_ids": [0, 100, 200, 256]},
    "logits processor": {"temperature": 1.0, "seed": 7, "logits_processors": ("even",)},
    "structured": {
        "temperature": 1.0,
        "seed": 8,
        "structured_outputs": StructuredOutputsParams(regex="[a-f]{4}[0-9]+"),
    },
}


def generate(llm, params, prompts=PROMPTS):
    return [[(o.token_ids, o.text) for o in request.outputs] for request in llm.generate(prompts, params)]


def logprob_errors(llm, exact, params, prompts=PROMPTS):
    """How far the log probabilities of prompts, and of what follows, are from those that `exact` has of these tokens.

    So models whose texts may differ by the rounding of their numbers are compared: which token is best is a matter of
    the last bit where two are nearly equal.
    """
    outputs = llm.generate(prompts, dataclasses.replace(params, logprobs=0, prompt_logprobs=0))
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    only_scores = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, adapter=params.adapter)
    found = [token.logprob for o in outputs for token in (*o.prompt_logprobs[1:], *o.outputs[0].logprobs)]
    wanted = [token.logprob for o in exact.generate(texts, only_scores) for token in o.prompt_logprobs[1:]]
    return np.abs(np.subtract(found, wanted))


def only_even(scores, history, length):
    """A logits processor: no odd token."""
    assert scores.shape[1] == CONFIG.vocab
    return scores.at[:, 1::2].set(-np.inf)


def next_of_last(scores, history, length):
    """A logits processor that looks at the text: the token after the last one, by number."""
    last = history[jnp.arange(len(length)), length - 1]
    return jnp.where(jnp.arange(scores.shape[-1]) == ((last + 1) % 256)[:, None], 0.0, -jnp.inf)


def check_logprobs(alone, other):
    """The log probabilities of two models' outputs and prompts are the same."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=20, prompt_logprobs=3)
    for one, another in zip(*(llm.generate(PROMPTS, params) for llm in (alone, other)), strict=True):
        found = [[*output.outputs[0].logprobs, *output.prompt_logprobs[1:]] for output in (one, another)]
        for first, second in zip(*found, strict=True):
            assert (first.token_id, list(first.top)) == (second.token_id, list(second.top))
            np.testing.assert_allclose(second.logprob, first.logprob, atol=2e-4)
            np.testing.assert_allclose([*second.top.values()], [*first.top.values()], atol=2e-4)


def fail_one_launch(executor, monkeypatch):
    """Have the next step fail, and lose all that it was given on the devices."""

    def launch(batch):
        monkeypatch.undo()
        for array in jax.tree.leaves(executor.state.arrays):
            array.delete()
        raise RuntimeError("injected")

    monkeypatch.setattr(executor, "launch", launch)
