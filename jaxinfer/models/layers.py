"""The parts that decoders and encoders are made of.

A layer reads like its formula; where its weights live and in which precision is said once, by `WeightFormat`.
Matrices take the format's dtype (or are quantised), vectors (norms, biases, scales) stay in float32. Every parameter
names its dimensions (`axes`), which `sharding.ShardingRules` maps onto a mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    RopeScaling,
    alibi_slopes,
)
from pallas_kernels import (
    KVPages,
    Weights,
    activate_outputs,
    attention,
    cached_attention,
    linear_residual,
    norm_linear,
    normalize,
    small_batch_linear,
    split_heads,
)
from pallas_kernels.weights import GROUP, STORED_AS, QuantizedFormat, quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How a model holds its matrices: their dtype, or in how few bits.

    Attributes:
      dtype: of float matrices, and what a quantised model computes in.
      quantized: None, or what the matrices are held in (`pallas_kernels/weights.py`).
    """

    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    quantized: QuantizedFormat | None = None

    def of_matrix(self, inputs: int) -> QuantizedFormat | None:
        """The format of a matrix with so many inputs: int4 holds whole groups of them, other matrices are int8."""
        return "int8" if self.quantized == "int4" and inputs % GROUP else self.quantized

    @property
    def of_table(self) -> QuantizedFormat | None:
        """The format of an embedding, whose rows are looked up and, in a tied model, are the outputs: never int4."""
        return "int8" if self.quantized == "int4" else self.quantized

    @property
    def matrix_dtype(self) -> np.dtype:
        """What most matrices are stored in."""
        return np.dtype({None: self.dtype, **STORED_AS}[self.quantized])


def _matrix(
    shape: tuple[int, int], axes: tuple[str, str], dtype: np.dtype, quantized: QuantizedFormat | None, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param | None]:
    """A matrix and its scales: random in float, zero if quantised. axes: names of (outputs, inputs)."""
    if quantized is None:
        return nnx.Param((0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype), axes=axes), None
    kernel, scale = quantize(jnp.zeros(shape, jnp.float32), quantized)
    assert scale is not None
    return nnx.Param(kernel, axes=axes), nnx.Param(scale, axes=axes[:1] if scale.ndim == 1 else axes[::-1])


def _weights(kernel: nnx.Param, scale: nnx.Param | None) -> Weights:
    """A matrix as products take it."""
    return Weights(kernel[...], None if scale is None else scale[...])


class LowRankStack(NamedTuple):
    """The low-rank updates (LoRA, arXiv:2106.09685) of one linear, one per adapter slot: y += (x a^T) b^T.

    a: [S, R, K]; b: [N, S, R], scale included; zeros where a slot is empty.
    """

    a: jax.Array
    b: jax.Array

    def __call__(self, x: jax.Array, chosen: jax.Array) -> jax.Array:
        """x: [..., K]; chosen: [..., S], 1 at the slot of each token, all 0 without an adapter. Returns [..., N].

        All slots are multiplied and the others' parts set to zero: two plain products, whatever rows sit together.
        """
        slots, rank, inputs = self.a.shape
        down, up = self.a.reshape(slots * rank, inputs), self.b.reshape(-1, slots * rank)
        reduced = small_batch_linear(x, Weights(down)).reshape(*x.shape[:-1], slots, rank)
        reduced *= chosen[..., None].astype(reduced.dtype)
        return small_batch_linear(reduced.reshape(*x.shape[:-1], slots * rank), Weights(up))


class LayerAdapters(NamedTuple):
    """The adapters of one decoder layer."""

    qkv: LowRankStack
    out: LowRankStack
    up: LowRankStack
    down: LowRankStack


Adapter = Callable[[jax.Array], jax.Array]
"""What a linear adds to its product: the updates of the adapters that its tokens have chosen."""


class Linear(nnx.Module):
    """x W^T + b, [..., K] -> [..., N], and what is fused with it: a norm before, an activation or a residual after."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        weights: WeightFormat,
        *,
        axes: tuple[str, str],  # names of (outputs, inputs)
        bias: bool,
        rngs: nnx.Rngs,
    ):
        self.kernel, self.scale = _matrix((outputs, inputs), axes, weights.dtype, weights.of_matrix(inputs), rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=axes[:1]) if bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: "Norm | None" = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: jax.Array | None = None,
        adapter: Adapter | None = None,
    ) -> jax.Array:
        """residual + act(norm(x) W^T + b), or with `gated` act(gate) * up of its alternating outputs.

        A norm and a residual do not come together, nor an activation and a residual.
        """
        weights, bias = _weights(self.kernel, self.scale), None if self.bias is None else self.bias[...]
        if adapter is None and norm is not None:
            fused = {"eps": norm.eps, "activation": activation, "gated": gated}
            return norm_linear(x, *norm.parameters, weights, bias, **fused)
        if adapter is None and residual is not None:
            return linear_residual(x, weights, residual, bias)
        x = x if norm is None else norm(x)
        y = small_batch_linear(x, weights, bias)
        if adapter is not None:
            y += adapter(x)
        y = activate_outputs(y, activation, gated=gated)
        return y if residual is None else residual + y


class Embedding(nnx.Module):
    """A table of vectors, looked up by id; also the output projection of a tied model.

    In int8 and fp8 every row has its scale, which is the per-channel scale of the output projection too.
    """

    def __init__(self, rows: int, embed: int, weights: WeightFormat, *, axes: tuple[str, str], rngs: nnx.Rngs):
        self.dtype = weights.dtype
        self.table, self.scale = _matrix((rows, embed), axes, weights.dtype, weights.of_table, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] -> [..., D]."""
        rows = self.table[...][ids]
        if self.scale is None:
            return rows
        return (rows.astype(jnp.float32) * self.scale[...][ids][..., None]).astype(self.dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """x table^T: [..., D] -> [..., rows]."""
        return small_batch_linear(x, _weights(self.table, self.scale))


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in float32."""

    def __init__(self, size: int, cfg: NormConfig):
        self.eps = cfg.eps
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=("norm",)) if cfg.kind is NormKind.LAYER else None

    @property
    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        """Scale and shift, [K] each; an RMSNorm has no shift."""
        return self.scale[...], None if self.bias is None else self.bias[...]

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(x, *self.parameters, eps=self.eps)


class Mlp(nnx.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated; [N, D] -> [N, D].

    A gated block keeps gate and up in one matrix with their outputs alternating, so that a tile of a fused kernel
    and a shard of a mesh hold both of each pair.
    """

    def __init__(self, embed: int, cfg: MlpConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        hidden = 2 * cfg.hidden if cfg.gated else cfg.hidden
        self.up = Linear(embed, hidden, weights, axes=("mlp", "embed"), bias=cfg.bias, rngs=rngs)
        self.down = Linear(cfg.hidden, embed, weights, axes=("embed", "mlp"), bias=cfg.bias, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(
        self,
        x: jax.Array,
        step: "Step",
        adapters: LayerAdapters | None = None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """residual + MLP(norm(x))."""
        activation, gated = self.cfg.activation, self.cfg.gated
        up, down = (None, None) if adapters is None else (step.adapter(adapters.up), step.adapter(adapters.down))
        hidden = self.up(x, norm=norm, activation=activation, gated=gated, adapter=up)
        return self.down(hidden, residual=residual, adapter=down)


class TokenRows(NamedTuple):
    """A rectangle of tokens, B rows of T; what a forward pass takes one or several of.

    Attributes:
      ids: int32 [B, T].
      positions: int32 [B, T], each token's place in its request, negative for padding; without a cache they are
        0, 1, ... and padding comes last.
      page_table: int32 [B, P], the pages of each row's context in order; None without a cache. Rows may share pages,
        or be pieces of one request: all keys and values of a layer are written before any is read.
      adapter: int32 [B], the adapter slot of each row, from 1; 0 is none. None: no row has one.
    """

    ids: jax.Array
    positions: jax.Array
    page_table: jax.Array | None = None
    adapter: jax.Array | None = None


class Step(NamedTuple):
    """What all layers of one forward pass share.

    Attributes:
      groups: the rows, whose shapes say how the N tokens, as `flat` joins them, divide.
      rotary: cos and sin of each group, float32 [B, T, 1, rotary_dim / 2], or None.
      chosen: [N, S], the adapter of each token, one-hot; None without adapters.
    """

    groups: tuple[TokenRows, ...]
    rotary: tuple[tuple[jax.Array, jax.Array] | None, ...]
    chosen: jax.Array | None = None

    def adapter(self, stack: LowRankStack) -> Adapter | None:
        """The updates that one linear's tokens have chosen."""
        return None if self.chosen is None else functools.partial(stack, chosen=self.chosen)


def flat(parts: Iterable[jax.Array]) -> jax.Array:
    """[B, T, ...] of every group -> [N, ...]; a single group keeps its form, for which XLA:GPU makes fewer kernels."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    return jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in found])


def unflat(x: jax.Array, groups: tuple[TokenRows, ...]) -> list[jax.Array]:
    """The groups' own parts, [B, T, ...] each, of what `flat` has joined."""
    if len(groups) == 1:
        return [x]
    ends = np.cumsum([group.ids.size for group in groups])
    parts = jnp.split(x, ends[:-1])
    return [part.reshape(*group.ids.shape, *x.shape[1:]) for part, group in zip(parts, groups, strict=True)]


def rotary_frequencies(cfg: PositionsConfig) -> np.ndarray:
    """Radians per position of each feature pair, float32 [rotary_dim / 2], with the config's scaling applied."""
    pairs = np.arange(0, cfg.rotary_dim, 2, dtype=np.float64)
    inverse = cfg.theta ** (-pairs / cfg.rotary_dim)
    match cfg.scaling:
        case None:
            pass
        case RopeScaling(kind="linear", factor=factor):
            inverse = inverse / factor
        case RopeScaling(kind="llama3") as scaling:
            wavelength = 2 * math.pi / inverse
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = np.clip((scaling.original_context / wavelength - low) / (high - low), 0.0, 1.0)
            inverse = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        case RopeScaling(kind="yarn") as scaling:

            def pair_at(rotations: float) -> float:
                """The feature index that turns `rotations` times within the original context."""
                period = scaling.original_context / (rotations * 2 * math.pi)
                return cfg.rotary_dim * math.log(period) / (2 * math.log(cfg.theta))

            low = max(math.floor(pair_at(scaling.beta_fast)), 0)
            high = min(math.ceil(pair_at(scaling.beta_slow)), cfg.rotary_dim - 1)
            ramp = np.clip((pairs / 2 - low) / max(high - low, 1e-3), 0.0, 1.0)
            inverse = ramp * inverse / scaling.factor + (1 - ramp) * inverse
    return inverse.astype(np.float32)


def rotary_table(cfg: PositionsConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every rotation, float32 [..., 1, rotary_dim / 2] (float32: bfloat16 rounds 257 to 256)."""
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(cfg)
    factor = cfg.scaling.attention_factor if cfg.scaling else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


class Attention(nnx.Module):
    """Grouped-query attention over each group's own tokens, or over a paged cache; [N, D] -> [N, D].

    The outputs of the fused projection are ordered by KV head: its group's queries, its key, its value; a shard
    along KV heads is complete in itself.
    """

    def __init__(
        self,
        embed: int,
        cfg: AttentionConfig,
        positions: PositionsConfig,
        norm: NormConfig,
        weights: WeightFormat,
        *,
        window: int | None = None,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.window, self.causal, self.norm_eps = cfg, window, causal, norm.eps
        self.alibi = alibi_slopes(cfg.q_heads) if positions.kind is PositionKind.ALIBI else None
        qkv, width = cfg.kv_heads * (cfg.group + 2) * cfg.head_dim, cfg.q_heads * cfg.head_dim
        self.qkv = Linear(embed, qkv, weights, axes=("heads", "embed"), bias=cfg.qkv_bias, rngs=rngs)
        self.out = Linear(width, embed, weights, axes=("embed", "heads"), bias=cfg.out_bias, rngs=rngs)
        self.q_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None
        self.k_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None

    @jax.named_scope("attention")
    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: KVPages | None,
        adapters: LayerAdapters | None = None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPages | None]:
        """residual + attention(norm(x)), and the cache with the tokens' keys and values in it."""
        into, out = (None, None) if adapters is None else (step.adapter(adapters.qkv), step.adapter(adapters.out))
        qkv = self.qkv(x, norm=norm, adapter=into)
        heads = []
        for group, rotary, part in zip(step.groups, step.rotary, unflat(qkv, step.groups), strict=True):
            mixed, cache = self._attend(group, rotary, part, cache)
            heads.append(mixed)
        return self.out(flat(heads), residual=residual, adapter=out), cache

    def _attend(
        self, group: TokenRows, rotary: tuple[jax.Array, jax.Array] | None, qkv: jax.Array, cache: KVPages | None
    ) -> tuple[jax.Array, KVPages | None]:
        """One group's heads, [B, T, Hq * K], over its pages, or without a cache over its own tokens."""
        cfg, positions = self.cfg, group.positions
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.scale[...], self.k_norm.scale[...])
        prepared: dict[str, Any] = {"rotary": rotary, "norms": norms, "norm_eps": self.norm_eps}
        options: dict[str, Any] = {
            "scale": cfg.score_scale,
            "window": self.window,
            "softcap": cfg.softcap,
            "alibi": self.alibi,
        }
        if cache is not None:
            assert group.page_table is not None
            return cached_attention(qkv, cache, group.page_table, positions, **prepared, **options)
        q, k, v = split_heads(qkv, kv_heads=cfg.kv_heads, head_dim=cfg.head_dim, **prepared)
        lengths = jnp.sum(positions >= 0, axis=1)
        heads = attention(q, k, v, positions, lengths, causal=self.causal, **options)
        return heads.reshape(*positions.shape, -1), None
