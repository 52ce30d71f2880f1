"""The engine's features beyond plain generation, each with a line of output that shows its effect.

python examples/batch_generate.py examples/demo_model
"""

import argparse
import json
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

WINDOW = 16
MODULE = '''"""Read and write the settings of a program."""

import argparse
import json
import os
import sys

DEFAULTS = {"verbose": False, "output": None, "encoding": "utf-8"}


class SettingsError(Exception):
    pass


'''
FUNCTIONS = [
    "def load(path):\n",
    "def save(path, settings):\n    with open(",
    "def main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument(",
    "class Settings:\n    def __init__(self, path=None, defaults=DEFAULTS):\n        self.path = path\n",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["load", "save", "main"]},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 9},
        "public": {"type": "boolean"},
    },
    "required": ["name", "arguments", "public"],
    "additionalProperties": False,
}
ASSIGNMENT = r"[a-z_]{3,10} = [0-9]{1,4}"


def no_repeats(scores: jax.Array, history: jax.Array, length: jax.Array) -> jax.Array:
    """Forbid repeating the last `WINDOW` tokens: a logits processor. float32 [B, V], int32 [B, C], int32 [B]."""
    index = jnp.arange(history.shape[1])
    recent = (index < length[:, None]) & (index >= length[:, None] - WINDOW)
    rows = jnp.arange(history.shape[0])[:, None]
    return scores.at[rows, jnp.where(recent, history, scores.shape[1])].set(-jnp.inf, mode="drop")


def share_a_prefix(llm: LLM) -> list[RequestOutput]:
    """Compute the common prefix of prompts once."""
    outputs = llm.generate([MODULE + text for text in FUNCTIONS], SamplingParams(max_tokens=16, temperature=0))
    for output in outputs:
        print(f"prefix: of {len(output.prompt_token_ids)} prompt tokens {output.num_cached_tokens} were in the cache")
    return outputs


def draw_samples(llm: LLM) -> RequestOutput:
    """Draw several completions of one prompt, each with its own seed."""
    (output,) = llm.generate("import ", SamplingParams(n=3, max_tokens=12, temperature=0.9, seed=1))
    print("samples:", " | ".join(repr(completion.text) for completion in output.outputs))
    return output


def combine_options(llm: LLM) -> dict[str, RequestOutput]:
    """Run requests with different options in one batch."""
    schema, assignment = StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(regex=ASSIGNMENT)
    requests = {
        "schema": ("# The function as JSON:\n", SamplingParams(structured_outputs=schema, temperature=0)),
        "regex": ("# A setting:\n", SamplingParams(structured_outputs=assignment, seed=2)),
        "stop": ("def first(items):\n    return", SamplingParams(stop=("\n",), max_tokens=32, temperature=0)),
        "processor": (
            "x = [0, 0, 0, 0,",
            SamplingParams(logits_processors=("no_repeats",), max_tokens=16, temperature=0),
        ),
    }
    prompts, params = zip(*requests.values(), strict=True)
    outputs = dict(zip(requests, llm.generate(prompts, params), strict=True))
    texts = {name: output.outputs[0].text for name, output in outputs.items()}
    print(f"schema: {json.loads(texts['schema'])}")
    print(f"regex: {texts['regex']!r} matches {ASSIGNMENT}: {re.fullmatch(ASSIGNMENT, texts['regex']) is not None}")
    print(f"stop string: {texts['stop']!r} ended before the end of its line")
    ids = outputs["processor"].outputs[0].token_ids
    print(f"logits processor: {len(set(ids))} different tokens of {len(ids)}: {texts['processor']!r}")
    return outputs


def prioritise(llm: LLM) -> list[RequestOutput]:
    """Let a request with a lower priority number overtake those that wait."""
    usual = SamplingParams(max_tokens=8, temperature=0)
    urgent = SamplingParams(max_tokens=8, temperature=0, priority=-1)
    outputs = llm.generate([f"value_{i} = " for i in range(12)], [usual] * 11 + [urgent])
    waited = [output.outputs[0].timings.first_token_s or 0.0 for output in outputs]
    print(f"priority: queued last of {len(outputs)}, served as number {sorted(waited).index(waited[-1]) + 1}")
    return outputs


def speculate(llm: LLM) -> RequestOutput:
    """Speculate with the n-gram proposer: it suggests what followed the same tokens before; one pass checks several."""
    prompt = "".join(f"parser.add_argument('--option', default=None)  # {word}\n" for word in ("one", "two", "six"))
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=48, temperature=0))
    completion = output.outputs[0]
    accepted, proposed = completion.num_accepted_tokens, completion.num_draft_tokens
    print(f"speculation: {accepted} of {proposed} speculative tokens were accepted")
    return output


def search_beams(llm: LLM) -> BeamSearchOutput:
    """Search for the most likely continuations; a round of the search computes one token per beam."""
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=10)
    (output,) = llm.beam_search("for i in ", params)
    for beam in output.beams:
        print(f"beam search: {beam.cumulative_logprob:.2f} {beam.text!r}")
    rounds = (params.max_tokens - 1) * params.beam_width
    print(f"beam search: computed {output.num_computed_tokens} tokens: the prompt's, and at most {rounds} of beams")
    return output


def run(model: str, max_batch: int) -> dict[str, Any]:
    """Run every part, and return its outputs by name."""
    llm = LLM(
        model,
        max_batch=max_batch,
        context=128,
        token_budget=32,  # small: fewer programs to compile
        num_speculative_tokens=7,
        logits_processors={"no_repeats": no_repeats},
    )
    memory = llm.memory
    print(f"memory: {memory.weights:,} bytes of weights, {memory.cache:,} of cache in {memory.num_pages} pages")
    llm.engine.compile_ahead()

    began = time.perf_counter()
    prefix, samples, options = share_a_prefix(llm), draw_samples(llm), combine_options(llm)
    priority, speculation = prioritise(llm), speculate(llm)
    seconds = time.perf_counter() - began
    outputs = [*prefix, samples, *options.values(), *priority, speculation]
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    print(f"all these: {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")

    beams = search_beams(llm)
    return {
        "prefix": prefix,
        "samples": samples,
        **options,
        "priority": priority,
        "speculation": speculation,
        "beams": beams,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--max-batch", type=int, default=4)
    args = parser.parse_args()
    run(args.model, args.max_batch)


if __name__ == "__main__":
    main()
