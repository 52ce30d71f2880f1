"""`Embedder`: sentence vectors from an encoder, or from a decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxinfer.compiled import enable_persistent_cache
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.engine import Engine
from jaxinfer.generation.llm import LLM
from jaxinfer.generation.text import Prompt, Tokenizer
from jaxinfer.models.loading import Description, load_model
from sharding import MeshConfig, ShardingRules

ENCODER_TOKENS = 4096
"""Most tokens of an encoder's batch, padding included, unless told otherwise."""


class Embedder:
    """A model, ready to embed texts: an encoder with its pooling, or a decoder by the mean of its hidden vectors.

    Args:
      path, mesh, dtype, quantize, rules: those of `LLM`.
      max_batch: most texts that run together. context: most tokens of one; None: the model's own.
      options: for a decoder, what else `LLM` takes; for an encoder token_budget, overlap and kernels of `EngineConfig`.

    Attributes:
      engine: where requests for embeddings can be queued one by one (`prepare_embedding`, `add`, `step`, `abort`).

    Raises as `LLM` does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: Mesh | MeshConfig | str | Path | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        rules: ShardingRules | None = None,
        max_batch: int = 32,
        context: int | None = None,
        **options: Any,
    ):
        if max_batch < 1:
            raise ValueError(f"Embedder.max_batch must be >= 1, got {max_batch}.")
        loading: dict[str, Any] = {"mesh": mesh, "dtype": dtype, "quantize": quantize, "rules": rules}
        if Description.read(path).kind == "decoder":
            self.engine = LLM(path, **loading, max_batch=max_batch, context=context, **options).engine
        else:
            self.engine = _encoder_engine(path, loading, max_batch, context, options)
        self.model, self.tokenizer = self.engine.model, self.engine.tokenizer

    def embed(self, texts: Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """Vectors of length 1, float32 [len(texts), D]. Raises ValueError for an empty or too long text, naming it."""
        return self.engine.embed(texts, adapter=adapter)


def _encoder_engine(
    path: str | Path, loading: dict[str, Any], max_batch: int, context: int | None, options: dict[str, Any]
) -> Engine:
    most = Description.read(path).config.context
    if context is not None and not 1 < context <= most:
        raise ValueError(f"Embedder.context must be in [2, {most}] for this model, got {context}.")
    options.setdefault("token_budget", ENCODER_TOKENS)
    config = EngineConfig(slots=max_batch, context=context or most, **options)
    enable_persistent_cache()
    model = load_model(path, **loading)
    return Engine(model, Tokenizer.of(model.folder), config)
