"""Requests with every sampling option, for tests that two ways of running a model give the same tokens."""

import numpy as np

from jaxinfer import StructuredOutputsParams
from tests.tiny import CONFIG

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


def only_even(scores, history, length):
    assert scores.shape[1] == CONFIG.vocab
    return scores.at[:, 1::2].set(-np.inf)
