"""`Embedder`: sentence vectors from an encoder, or from a decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from jaxinfer.generation.api.build import ModelOptions, build_engine, open_costs, place_model, split_options
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.api.llm import LLM
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.text import Prompt, Tokenizer
from jaxinfer.models.description import Description, require_transformer
from jaxinfer.models.devices import AnyMesh, build_mesh, open_mesh
from jaxinfer.models.loading import LoadedModel, open_model
from sharding import ShardingRules

ENCODER_TOKENS = 4096
"""The token budget of an encoder's batch, padding included, unless told otherwise."""


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
      options: those of `LLM` for a decoder; for an encoder token_budget, overlap, level, kernels, and `MemoryOptions`.

    Attributes:
      engine: where requests can be queued one by one (`prepare` with PoolingParams, `add`, `step`, `abort`).

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
        description = Description.read(path)
        self.model: LoadedModel
        self.engine: Engine
        self.tokenizer: Tokenizer | None
        if description.kind == "decoder":
            llm = LLM(
                path,
                mesh=mesh,
                dtype=dtype,
                quantize=quantize,
                rules=rules,
                max_batch=max_batch,
                context=context,
                **options,
            )
            self.model, self.engine, self.tokenizer = llm.model, llm.engine, llm.tokenizer
            return
        longest = require_transformer(path, description.config).context
        if context is not None and not 1 < context <= longest:
            raise ValueError(f"Embedder.context must be in [2, {longest}] for this model, got {context}.")
        mesh = open_mesh(mesh)
        engine_options, memory = split_options(options, mesh, owner="Embedder")
        engine_options.setdefault("token_budget", ENCODER_TOKENS)
        config = EngineConfig(max_batch=max_batch, context=context or longest, **engine_options)
        mesh, rules = build_mesh(mesh, rules)
        opened = open_model(path, mesh=mesh, dtype=dtype, quantize=quantize, rules=rules)
        costs = open_costs(opened, config)
        self.model, config = place_model(opened, config, memory, costs=costs, given=options.keys())
        self.tokenizer = Tokenizer.of(self.model.folder)
        self.engine = build_engine(self.model, self.tokenizer, config, costs=costs)

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """The vectors of one or several texts, of length 1: float32 [texts, D].

        Raises ValueError for an invalid text, naming it, before anything runs.
        """
        return embed(self.engine, texts, size=self.model.transformer.output_width, adapter=adapter)
