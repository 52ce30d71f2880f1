"""A model that answers from a script: each last token of a prompt has its answer. A real decoder, with no attention.

Each token has an embedding of its own, and the head gives the most to the token that the script has next. Answers are
single tokens, so that a text of any length costs one, or the pieces that they are given in.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tokenizers import AddedToken

from jaxinfer.models.files.loading import save_model
from tests.tiny import AGENT_TEMPLATE, ONE_KIND, byte_tokenizer, random_model

WIDTH = 128
TURNS = "{% set turns = messages | selectattr('role', 'equalto', 'assistant') | list | length %}"


def save_scripted(path: Path, answers: list[str | list[str]], context: int = 4096) -> Path:
    """Write a model directory whose model gives one of these answers after the other in a conversation.

    answers: each one token, or several, of which no answer has one twice or shares one with another.
    """
    tokenizer = byte_tokenizer()
    cues = [f"<turn {number}>" for number in range(len(answers))]
    said = [[answer] if isinstance(answer, str) else answer for answer in answers]
    texts = dict.fromkeys(itertools.chain(cues, *said))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    end = ids["<end>"]
    chains = [[ids[cue], *(ids[text] for text in answer), end] for cue, answer in zip(cues, said, strict=True)]
    follows = {token: after for chain in chains for token, after in itertools.pairwise(chain)}
    template = AGENT_TEMPLATE.replace("assistant:{% if", TURNS + "assistant:<turn {{ turns }}>{% if")
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
    }
    config = dataclasses.replace(ONE_KIND, vocab=max(ids.values()) + 1, context=context, layers=1, embed=WIDTH)
    save_model(path, _following(random_model(config), follows), family="tiny", tokenizer=files, eos_ids=(end,))
    return path


def _following(model: nnx.Module, follows: dict[int, int]) -> nnx.Module:
    """The model in which these tokens are followed by those, whatever came before them."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    table = np.random.default_rng(0).normal(size=variables["embed", "table"].shape).astype(np.float32)
    head = np.zeros_like(table)
    for token, next_token in follows.items():
        head[next_token] += table[token]
    changed = {("embed", "table"): table, ("head", "weight"): head}
    changed |= {name: np.zeros(v.shape, v.dtype) for name, v in variables.items() if name[-2] in ("out", "down")}
    for name, value in changed.items():
        variables[name].set_value(jax.device_put(value.astype(variables[name].dtype), jax.devices()[0]))
    return model
