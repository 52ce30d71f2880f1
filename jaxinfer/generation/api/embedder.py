"""`Embedder`: sentence vectors from an encoder, or from a decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from jaxinfer.generation.api.build import ModelOptions
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.api.holder import EngineHolder
from jaxinfer.generation.api.loading import load_engine
from jaxinfer.generation.other_names import MODEL, refuses
from jaxinfer.generation.text import Prompt
from jaxinfer.models.devices import AnyMesh
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.sharding import ShardingRules


@refuses(MODEL)
class Embedder(EngineHolder):
    """A model, ready to embed texts: an encoder with its pooling, or a decoder by the mean of its hidden vectors.

    Args:
      path: a model directory, or what stands for one, as in `LLM`.
      mesh: how to split the model over devices, as in `LLM`.
      dtype: as in `LLM`.
      quantize: as in `LLM`.
      rules: as in `LLM`.
      max_batch: how many texts can run at once.
      context: how many tokens a text can have; None: the model's own.
      progress: as in `LLM`.
      options: those of `LLM` for a decoder; for an encoder those of `EngineOptions` that `EncoderEngineConfig` has, and
        `MemoryOptions`.

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
        progress: ProgressOption = None,
        **options: Unpack[ModelOptions],
    ):
        with showing(progress), long_work(f"loading {path}"):
            loaded = load_engine(
                path,
                owner="Embedder",
                mesh=mesh,
                dtype=dtype,
                quantize=quantize,
                rules=rules,
                max_batch=max_batch,
                context=context,
                **options,
            )
        super().__init__(loaded)

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """Return the vectors of one or several texts, of length 1: float32 [texts, D].

        Raises ValueError for an invalid text, naming it, before anything runs.
        """
        with self._call() as engine:
            return embed(engine, texts, size=self.model.transformer.output_width, adapter=adapter)
