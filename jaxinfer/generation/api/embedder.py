"""`Embedder`: sentence vectors from an encoder, or from a decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from jaxinfer.generation.api.build import ModelOptions
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.api.loading import load_decoder, load_encoder
from jaxinfer.generation.text import Prompt
from jaxinfer.models.description import Description
from jaxinfer.models.devices import AnyMesh
from sharding import ShardingRules


class Embedder:
    """A model, ready to embed texts: an encoder with its pooling, or a decoder by the mean of its hidden vectors.

    Args:
      path: a model directory.
      mesh: how to split the model over devices, as in `LLM`.
      dtype: as in `LLM`.
      quantize: as in `LLM`.
      rules: as in `LLM`.
      max_batch: how many texts can run at once.
      context: how many tokens a text can have; None: the model's own.
      options: those of `LLM` for a decoder; for an encoder those of `EngineOptions` that `EncoderEngineConfig` has, and
        `MemoryOptions`.

    Attributes:
      engine: where requests can be queued one by one (`prepare` with PoolingParams, `add`, `step`, `abort`).
      placement, streaming: as those of `LLM`.

    Raises as `LLM` does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: AnyMesh = None,
        dtype: str | None = None,
        quantize: str | None = None,
        rules: ShardingRules | None = None,
        max_batch: int = 32,
        context: int | None = None,
        **options: Unpack[ModelOptions],
    ):
        if max_batch < 1:
            raise ValueError(f"Embedder.max_batch must be >= 1, got {max_batch}.")
        load = load_decoder if Description.read(path).kind == "decoder" else load_encoder
        loaded = load(
            path,
            mesh=mesh,
            dtype=dtype,
            quantize=quantize,
            rules=rules,
            max_batch=max_batch,
            context=context,
            **options,
        )
        self.engine, self.model, self.tokenizer = loaded.engine, loaded.model, loaded.tokenizer
        self.placement, self.streaming = loaded.placement, loaded.streaming

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """The vectors of one or several texts, of length 1: float32 [texts, D].

        Raises ValueError for an invalid text, naming it, before anything runs.
        """
        return embed(self.engine, texts, size=self.model.transformer.output_width, adapter=adapter)
