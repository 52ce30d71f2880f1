"""The requests of a measurement: random prompts and lengths, or prompts from a file."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxinfer.cli.bench.options import check_length
from jaxinfer.cli.common import read_prompts
from jaxinfer.hub import resolve
from jaxinfer.text import Tokenizer, encode_prompt


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens to generate."""

    prompt_token_ids: list[int]
    output_tokens: int


def random_prompts(rng: np.random.Generator, vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """Draw prompts of these lengths, token ids uniform in [0, vocab)."""
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def spread_lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> list[int]:
    """Draw `count` lengths >= 1, uniform over the integers from mean * (1 - spread) to mean * (1 + spread)."""
    shortest, longest = (max(1, round(mean * factor)) for factor in (1 - spread, 1 + spread))
    return rng.integers(shortest, longest, count, endpoint=True).tolist()


def encode_prompts(file: Path, count: int | None, model: Path, vocab: int) -> list[list[int]]:
    """Return the token ids of the first `count` prompts in `file`; of all if None."""
    prompts, tokenizer = read_prompts([], file, []), Tokenizer.from_folder(resolve(model))
    if count is not None and count > len(prompts):
        raise ValueError(f"--requests {count} is more than the {len(prompts)} prompts in {file}.")
    encoded = []
    for number, prompt in enumerate(prompts[:count], 1):
        try:
            ids = encode_prompt(tokenizer, prompt, vocab)
        except ValueError as error:
            raise ValueError(f"{file}:{number}: {error}") from error
        if not ids:
            raise ValueError(f"{file}:{number}: the prompt is empty.")
        encoded.append(ids)
    return encoded


def draw_prompts(rng: np.random.Generator, vocab: int, mean: int, spread: float, count: int) -> list[list[int]]:
    """Draw `count` random prompts, whose lengths are those of `spread_lengths`."""
    return random_prompts(rng, vocab, spread_lengths(rng, mean, spread, count))


def make_requests(
    rng: np.random.Generator, prompts: Sequence[list[int]], mean: int, spread: float, *, context: int
) -> list[BenchRequest]:
    """Make a request of each prompt, whose numbers of output tokens are those of `spread_lengths`.

    Raises ValueError for a request that exceeds the context.
    """
    requests = list(map(BenchRequest, prompts, spread_lengths(rng, mean, spread, len(prompts))))
    for number, request in enumerate(requests, 1):
        check_length(len(request.prompt_token_ids), request.output_tokens, context, f"Request {number}: ")
    return requests
