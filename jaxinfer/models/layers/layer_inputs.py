"""The vectors of a second table that layers take for each token (Gemma 4)."""

import jax
import numpy as np
from flax import nnx

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


class LayerInputs(nnx.Module):
    """The vectors of all layers, of width P: of the token, and of its embedding.

    Attributes:
      table: [V, layers * P].
      projection: of the embeddings, [layers * P, D].
      norm: of what the projection returns, of each layer by itself.
    """

    def __init__(self, cfg: DecoderConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        assert cfg.layer_inputs is not None
        self.layers, self.width = cfg.layers, cfg.layer_inputs
        outputs = self.layers * self.width
        self.table = Embedding(cfg.vocab_rows, outputs, weights, axes=("vocab", "word_embed"), rngs=rngs)
        self.projection = Linear(cfg.embed, outputs, weights, axes=("word_embed", "embed"), bias=False, rngs=rngs)
        self.norm = Norm(self.width, cfg.norm)

    @jax.named_scope("layer_inputs")
    def __call__(self, ids: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Compute the vectors: ids [...], embeddings [..., D] -> [..., layers, P]."""
        shape, dtype = (*ids.shape, self.layers, self.width), embeddings.dtype
        of_token = self.table(ids).reshape(shape) * np.asarray(self.width**0.5, dtype)
        projected = self.projection(embeddings) * np.asarray(embeddings.shape[-1] ** -0.5, dtype)
        return (of_token + self.norm(projected.reshape(shape))) * np.asarray(0.5**0.5, dtype)


class LayerInput(nnx.Module):
    """One layer's way from its vectors to the residual stream: x + norm(project(act(gate(x)) * vectors)).

    Attributes:
      gate: [P, D].
      projection: [D, P].
      norm: of width D.
    """

    def __init__(self, cfg: DecoderConfig, activation: Activation, weights: WeightFormat, *, rngs: nnx.Rngs):
        assert cfg.layer_inputs is not None
        width, self.activation = cfg.layer_inputs, activation
        self.gate = Linear(cfg.embed, width, weights, axes=("word_embed", "embed"), bias=False, rngs=rngs)
        self.projection = Linear(width, cfg.embed, weights, axes=("embed", "word_embed"), bias=False, rngs=rngs)
        self.norm = Norm(cfg.embed, cfg.norm)

    @jax.named_scope("layer_input")
    def __call__(self, x: jax.Array, vectors: jax.Array) -> jax.Array:
        """Join the vectors of the tokens, [N, P], to the stream: [N, D] -> [N, D]."""
        gated = self.gate.norm_linear(x, None, activation=self.activation) * vectors
        return x + self.norm(self.projection(gated))
