"""`/v1/embeddings`."""

import asyncio
import base64
from typing import Any, Literal

import numpy as np

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.bodies import Body, as_prompts
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.limits import Limits


class EmbeddingBody(Body, kw_only=True):
    """The body of `/v1/embeddings`."""

    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"


async def embeddings(
    llm: AsyncLLM, body: EmbeddingBody, model: str, adapter: str | None, limits: Limits
) -> dict[str, Any]:
    """Embed texts. Raises BadRequestError, ValueError, OverloadedError."""
    texts = as_prompts("input", body.input, limits.max_prompts)
    width = llm.model.transformer.output_width
    size = width if body.dimensions is None else body.dimensions
    if not 1 <= size <= width:
        raise BadRequestError(f"dimensions must be in [1, {width}] for this model, got {size}.", param="dimensions")
    vectors = await llm.embed(texts, adapter=adapter, deadline=limits.timeout)
    if size < width:  # as models trained for it (arXiv:2205.13147) are cut
        vectors = vectors[:, :size] / np.linalg.norm(vectors[:, :size], axis=1, keepdims=True)
    tokens = await asyncio.to_thread(lambda: sum(_count(llm, text) for text in texts))
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _count(llm: AsyncLLM, text: str | list[int]) -> int:
    """The tokens of a text, as far as the model takes them."""
    count = len(llm.tokenizer.encode(text)) if isinstance(text, str) and llm.tokenizer else len(text)
    return min(count, llm.engine.config.context)


def _encoded(vector: np.ndarray, form: str) -> list[float] | str:
    """A vector as numbers, or as the base64 of its float32, little-endian."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
