"""The bidirectional encoder (BERT, DistilBERT, RoBERTa) and its sentence embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import DenseActivation, DenseConfig, EncoderConfig, Pooling
from jaxinfer.models.layers.forward_context import ForwardContext, TokenRows
from jaxinfer.models.layers.layer import TransformerLayer
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, TokenAdaptation
from jaxinfer.models.weight_format import WeightFormat

_ACTIVATIONS = {
    None: lambda x: x,
    DenseActivation.TANH: jnp.tanh,
    DenseActivation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
    DenseActivation.RELU: jax.nn.relu,
    DenseActivation.SILU: jax.nn.silu,
}


class Dense(nnx.Module):
    """act(x W^T + b), [B, K] -> [B, N], in float32: a layer behind the pooling."""

    def __init__(self, inputs: int, cfg: DenseConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        weights = WeightFormat(dtype=jnp.dtype(jnp.float32))  # one row per text: nothing to save
        self.linear = Linear(inputs, cfg.outputs, weights, axes=("embed", "embed"), bias=cfg.bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _ACTIVATIONS[self.cfg.activation](self.linear(x))


class Encoder(nnx.Module):
    """Token ids to one vector per token; every token attends to all tokens of its row."""

    def __init__(self, cfg: EncoderConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = Embedding(cfg.vocab_rows, cfg.embed, weights, axes=("vocab", "embed"), rngs=rngs)
        table = WeightFormat(dtype=weights.dtype)  # added, not multiplied: never int8
        rows = cfg.context + cfg.learned_positions.offset
        self.positions = Embedding(rows, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
        self.token_types = (
            Embedding(cfg.token_types, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
            if cfg.token_types
            else None
        )
        self.embed_norm = Norm(cfg.embed, cfg.norm)
        self.layers = nnx.List(
            [TransformerLayer(cfg, weights, layer=i, causal=False, rngs=rngs) for i in range(cfg.layers)]
        )
        widths = (cfg.embed, *(dense.outputs for dense in cfg.dense))
        self.dense = nnx.List([Dense(*parts, rngs=rngs) for parts in zip(widths, cfg.dense, strict=False)])

    def __call__(self, tokens: jax.Array, positions: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """Run `enter` and all layers: hidden vectors [B, T, D].

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T], negative for padding.
          token_types: int32 [B, T]; None: all 0.
        """
        return self.run_layers(*self.enter(tokens, positions, token_types))

    def enter(
        self, tokens: jax.Array, positions: jax.Array, token_types: jax.Array | None = None
    ) -> tuple[jax.Array, ForwardContext]:
        """The embeddings, [B, T, D], and what all layers share; arguments as above."""
        x = self.embed(tokens) + self.positions(jnp.maximum(positions, 0) + self.cfg.learned_positions.offset)
        if self.token_types is not None:
            x += self.token_types(jnp.zeros_like(tokens) if token_types is None else token_types)
        return self.embed_norm(x), ForwardContext.from_groups((TokenRows(tokens, positions),), ())

    def run_layers(
        self, x: jax.Array, forward_context: ForwardContext, *, first: int = 0, last: int | None = None
    ) -> jax.Array:
        """Run layers `first` to `last`, both included (None: the last of the model): [B, T, D] -> [B, T, D]."""
        for layer in self.layers[first : len(self.layers) if last is None else last + 1]:
            x, _ = layer(x, forward_context)
        return x

    def vectors(
        self, tokens: jax.Array, positions: jax.Array, adaptation: TokenAdaptation = NO_ADAPTATION
    ) -> jax.Array:
        """Encode each row as one float32 vector, of length 1 if the model normalises: [B, D].

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T], negative for padding.
          adaptation: which tokens are merged; the first one is not.
        """
        if not adaptation.merges:
            return self.pool(self(tokens, positions), positions >= 0)
        x, _ = self.enter(tokens, positions)
        real = (positions >= 0).astype(jnp.float32)
        x, sizes, _ = adaptation.run_layers(self.layers, x, sizes=real)
        assert sizes is not None, "they were given"
        return self.pool(x, sizes)

    def pool(self, hidden: jax.Array, sizes: jax.Array) -> jax.Array:
        """Make one vector of each row's: pool, run the dense layers, normalise. [B, T, K] -> float32 [B, D].

        Args:
          hidden: [B, T, K].
          sizes: [B, T], how many tokens of the text each vector stands for; 0 for padding, which comes last.
        """
        hidden = hidden.astype(jnp.float32)
        match self.cfg.pooling:
            case Pooling.CLS:
                pooled = hidden[:, 0]
            case Pooling.MEAN:
                weights = sizes.astype(jnp.float32)[..., None]
                pooled = jnp.sum(hidden * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)
            case Pooling.MAX:
                pooled = jnp.max(jnp.where(sizes[..., None] > 0, hidden, jnp.finfo(jnp.float32).min), axis=1)
            case Pooling.LAST:
                last = jnp.maximum(jnp.sum(sizes > 0, axis=1) - 1, 0)
                pooled = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        for dense in self.dense:
            pooled = dense(pooled)
        if not self.cfg.normalize:
            return pooled
        return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
