"""`Embedder`: sentence vectors from an encoder."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.compiled import (
    Bucket,
    Program,
    ProgramCache,
    compile_program,
    enable_persistent_cache,
    powers,
    round_up,
)
from jaxinfer.generation.text import Prompt, Tokenizer, encode_prompt
from jaxinfer.models import EncoderConfig
from jaxinfer.models.loading import load_model
from sharding import MeshConfig


class Embedder:
    """An encoder, ready to embed texts; the arguments are those of `LLM`."""

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: Mesh | MeshConfig | str | Path | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        max_batch: int = 32,
    ):
        if max_batch < 1:
            raise ValueError(f"Embedder.max_batch must be >= 1, got {max_batch}.")
        enable_persistent_cache()
        self.model = load_model(path, mesh=mesh, dtype=dtype, quantize=quantize)
        config = self.model.config
        if not isinstance(config, EncoderConfig):
            raise ValueError(f"{path} holds a decoder; use jaxinfer.LLM for it.")
        self.config = config
        self.tokenizer = Tokenizer.of(self.model.folder)
        self._leaves, self._treedef = jax.tree.flatten(self.model.state)
        self._batches = powers(2, 1, max_batch)
        self._lengths = powers(4, min(16, config.context), config.context)
        self.programs = ProgramCache(self._build)

    def _build(self, name: str, bucket: Bucket) -> Program:
        sizes, graphdef, treedef = dict(bucket), self.model.graphdef, self._treedef
        tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["tokens"]), jnp.int32)

        def embed(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            return model.pool(model(tokens, positions), positions)

        return compile_program(name, bucket, embed, (self._leaves, tokens, tokens))

    def embed(self, texts: Sequence[Prompt]) -> np.ndarray:
        """Vectors of length 1, float32 [len(texts), D]. Raises ValueError for an empty or too long text."""
        prompts = [self._encode(index, text) for index, text in enumerate(texts)]
        out = np.zeros((len(prompts), self.config.embed), np.float32)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little padding in each batch
        for first in range(0, len(order), self._batches[-1]):
            chosen = order[first : first + self._batches[-1]]
            out[chosen] = self._embed_batch([prompts[i] for i in chosen])
        return out

    def _embed_batch(self, prompts: list[list[int]]) -> np.ndarray:
        batch = round_up(len(prompts), self._batches)
        length = round_up(max(map(len, prompts)), self._lengths)
        tokens, positions = np.zeros((batch, length), np.int32), np.full((batch, length), -1, np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
        program = self.programs.get("embed", batch=batch, tokens=length)
        return np.asarray(program(self._leaves, tokens, positions))[: len(prompts)]

    def _encode(self, index: int, text: Prompt) -> list[int]:
        ids = encode_prompt(self.tokenizer, text, self.config.vocab)
        if not 0 < len(ids) <= self.config.context:
            raise ValueError(f"Text {index} has {len(ids)} tokens; this model takes 1 to {self.config.context}.")
        return ids
