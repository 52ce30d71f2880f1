"""The parts that decoders and encoders are made of.

A layer reads like its formula; where its weights live and in which precision is said once, by `WeightFormat`.
Matrices take the format's dtype (or int8), vectors (norms, biases, scales) stay in float32. Every parameter names
its dimensions (`axes`), which `sharding.ShardingRules` maps onto a mesh.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

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
from pallas_kernels import KVPages, attention, linear, paged_attention, quantized_linear, write_pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How a model holds its matrices: their dtype, and whether they are int8."""

    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    int8: bool = False

    @property
    def matrix_dtype(self) -> np.dtype:
        """What the matrices are stored in."""
        return np.dtype(np.int8) if self.int8 else self.dtype


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


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
        reduced = linear(x, self.a.reshape(slots * rank, inputs)).reshape(*x.shape[:-1], slots, rank)
        reduced *= chosen[..., None].astype(reduced.dtype)
        return linear(reduced.reshape(*x.shape[:-1], slots * rank), self.b.reshape(-1, slots * rank))


class LayerAdapters(NamedTuple):
    """The adapters of one decoder layer."""

    qkv: LowRankStack
    out: LowRankStack
    up: LowRankStack
    down: LowRankStack


class Linear(nnx.Module):
    """x W^T + b, [..., K] -> [..., N], in float or (with `weights.int8`) with int8 weights and activations."""

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
        shape = (outputs, inputs)
        if weights.int8:
            self.kernel = nnx.Param(jnp.zeros(shape, jnp.int8), axes=axes)
            self.scale = nnx.Param(jnp.ones(outputs, jnp.float32), axes=axes[:1])
        else:
            self.kernel = nnx.Param(_normal(rngs, shape, weights.dtype), axes=axes)
            self.scale = None
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=axes[:1]) if bias else None

    def __call__(self, x: jax.Array, step: "Step | None" = None, adapters: LowRankStack | None = None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        if self.scale is None:
            y = linear(x, self.kernel[...], bias)
        else:
            y = quantized_linear(x, self.kernel[...], self.scale[...], bias)
        if adapters is None or step is None or step.chosen is None:
            return y
        return y + adapters(x, step.chosen)


class Embedding(nnx.Module):
    """A table of vectors, looked up by id; also the output projection of a tied model.

    In int8 every row has its scale, which is the per-channel scale of the output projection too.
    """

    def __init__(self, rows: int, embed: int, weights: WeightFormat, *, axes: tuple[str, str], rngs: nnx.Rngs):
        self.dtype = weights.dtype
        if weights.int8:
            self.table = nnx.Param(jnp.zeros((rows, embed), jnp.int8), axes=axes)
            self.scale = nnx.Param(jnp.ones(rows, jnp.float32), axes=axes[:1])
        else:
            self.table = nnx.Param(_normal(rngs, (rows, embed), weights.dtype), axes=axes)
            self.scale = None

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] -> [..., D]."""
        rows = self.table[...][ids]
        if self.scale is None:
            return rows
        return (rows * self.scale[...][ids][..., None]).astype(self.dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """x table^T: [..., D] -> [..., rows]."""
        if self.scale is None:
            return linear(x, self.table[...])
        return quantized_linear(x, self.table[...], self.scale[...])


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in float32."""

    def __init__(self, size: int, cfg: NormConfig):
        self.eps = cfg.eps
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=("norm",)) if cfg.kind is NormKind.LAYER else None

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y *= self.scale[...]
        if self.bias is not None:
            y += self.bias[...]
        return y.astype(x.dtype)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The MLP's nonlinearity, elementwise."""
    match activation:
        case Activation.GELU:
            return jax.nn.gelu(x, approximate=False)
        case Activation.GELU_TANH:
            return jax.nn.gelu(x, approximate=True)
        case Activation.RELU:
            return jax.nn.relu(x)
        case Activation.SILU:
            return jax.nn.silu(x)


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
    def __call__(self, x: jax.Array, step: "Step | None" = None, adapters: LayerAdapters | None = None) -> jax.Array:
        hidden = self.up(x, step, adapters and adapters.up)
        if self.cfg.gated:
            pairs = hidden.reshape(*hidden.shape[:-1], self.cfg.hidden, 2)  # [..., F, (gate, up)]
            hidden = activate(pairs[..., 0], self.cfg.activation) * pairs[..., 1]
        else:
            hidden = activate(hidden, self.cfg.activation)
        return self.down(hidden, step, adapters and adapters.down)


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
    """What all layers of one forward pass share; the N tokens of all rows together, as `flat` joins them.

    Attributes:
      groups: the rows, whose shapes say how the N tokens divide.
      rotary: cos and sin, float32 [N, 1, rotary_dim / 2], or None.
      page, slot: int32 [N], where each token's key and value are stored; None without a cache.
      chosen: [N, S], the adapter of each token, one-hot; None without adapters.
    """

    groups: tuple[TokenRows, ...]
    rotary: tuple[jax.Array, jax.Array] | None = None
    page: jax.Array | None = None
    slot: jax.Array | None = None
    chosen: jax.Array | None = None


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


def storage(group: TokenRows, page_size: int, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """The page and the place in it of every token, int32 [B, T] each; padding goes to page `num_pages`: nowhere."""
    assert group.page_table is not None
    page = jnp.take_along_axis(group.page_table, jnp.maximum(group.positions, 0) // page_size, axis=1)
    return jnp.where(group.positions < 0, num_pages, page), group.positions % page_size


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


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the leading features of each head, i with i + rotary_dim / 2. x: [N, H, K]."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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
        self.cfg, self.window, self.causal = cfg, window, causal
        self.alibi = alibi_slopes(cfg.q_heads) if positions.kind is PositionKind.ALIBI else None
        qkv, width = cfg.kv_heads * (cfg.group + 2) * cfg.head_dim, cfg.q_heads * cfg.head_dim
        self.qkv = Linear(embed, qkv, weights, axes=("heads", "embed"), bias=cfg.qkv_bias, rngs=rngs)
        self.out = Linear(width, embed, weights, axes=("embed", "heads"), bias=cfg.out_bias, rngs=rngs)
        self.q_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None
        self.k_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None

    @jax.named_scope("attention")
    def __call__(
        self, x: jax.Array, step: Step, cache: KVPages | None, adapters: LayerAdapters | None = None
    ) -> tuple[jax.Array, KVPages | None]:
        cfg = self.cfg
        qkv = self.qkv(x, step, adapters and adapters.qkv)
        grouped = qkv.reshape(*x.shape[:-1], cfg.kv_heads, cfg.group + 2, cfg.head_dim)
        q = grouped[..., : cfg.group, :].reshape(*x.shape[:-1], cfg.q_heads, cfg.head_dim)
        k, v = grouped[..., cfg.group, :], grouped[..., cfg.group + 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step.rotary is not None:
            q, k = rotate(q, step.rotary), rotate(k, step.rotary)
        if cache is not None:
            assert step.page is not None
            assert step.slot is not None
            runs = sum(len(group.ids) for group in step.groups)  # of tokens that follow one another
            new_k, new_v = (part.reshape(-1, *part.shape[-2:]) for part in (k, v))
            cache = write_pages(cache, new_k, new_v, step.page.reshape(-1), step.slot.reshape(-1), rows=runs)
        groups = zip(step.groups, *(unflat(part, step.groups) for part in (q, k, v)), strict=True)
        heads = flat(self._attend(group, q, k, v, cache) for group, q, k, v in groups)
        return self.out(heads.reshape(*x.shape[:-1], -1), step, adapters and adapters.out), cache

    def _attend(self, group: TokenRows, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVPages | None) -> jax.Array:
        """One group's heads, [B, T, Hq, K], over its pages, or without a cache over its own tokens."""
        cfg, positions = self.cfg, group.positions
        options: dict[str, Any] = {
            "scale": cfg.score_scale,
            "window": self.window,
            "softcap": cfg.softcap,
            "alibi": self.alibi,
        }
        if cache is None:
            lengths = jnp.sum(positions >= 0, axis=1)
            return attention(q, k, v, positions, lengths, causal=self.causal, **options)
        assert group.page_table is not None
        return paged_attention(q, cache, group.page_table, positions, **options)
