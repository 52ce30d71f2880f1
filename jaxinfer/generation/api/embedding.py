"""Vectors of texts, through any engine."""

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import numpy as np

from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.params import PoolingParams
from jaxinfer.text import Prompt, as_list


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`, as in `PoolingParams`."""

    adapter: str | None
    prompt: str | None
    truncate: bool


def embed(
    engine: Engine, texts: Prompt | Sequence[Prompt], *, size: int, **options: Unpack[EmbedOptions]
) -> np.ndarray:
    """Compute the vectors of one or several texts, or token ids: float32 [texts, size].

    Raises ValueError for an invalid text, naming it, before anything runs; RuntimeError if a step fails.
    """
    groups = [request.sequences() for request in pooling_requests(engine, as_list(texts), **options)]
    for _ in engine.run(groups):
        pass
    for index, (sequence,) in enumerate(groups):
        if sequence.error is not None:
            raise RuntimeError(f"Text {index}: {sequence.error}")
    return np.array([sequence.embedding for (sequence,) in groups], np.float32).reshape(-1, size)


def pooling_requests(engine: Engine, texts: Iterable[Prompt], **options: Unpack[EmbedOptions]) -> list[Request]:
    """Make a request for the vector of each text. Raises ValueError for an invalid one, naming it."""
    params, requests = PoolingParams(**options), []
    for index, text in enumerate(texts):
        try:
            requests.append(engine.prepare(text, params))
        except ValueError as error:
            raise ValueError(f"Text {index}: {error}") from error
    return requests
