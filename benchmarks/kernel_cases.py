"""Every operation with a kernel: the cases that are lowered, compiled, tabulated, timed and checked.

A builder for each operation makes its cases from sizes. `every_case` has the shapes of real models; `gpu/cases.py` has
what the GPU benchmark times and checks. Dimension letters are those of the operations' modules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import references
from benchmarks.gpu.tolerances import tolerance
from jaxinfer.models import DecoderConfig
from jaxinfer.models.presets import preset
from jaxinfer.pallas_kernels import (
    KVPages,
    RecurrentState,
    attention,
    cached_attention,
    gated_delta_rule,
    linear_residual,
    merge_tokens,
    moe,
    norm_linear,
    norm_quantize,
    paged_attention,
    quantize_rows,
    quantized_matmul,
    small_batch_linear,
)
from jaxinfer.pallas_kernels import weights as formats
from jaxinfer.pallas_kernels.delta_rule.mosaic.tiles import CHUNK
from jaxinfer.pallas_kernels.dispatch import without_kernels
from jaxinfer.pallas_kernels.linear.mosaic.small_batch import MAX_RESIDENT_ROWS
from jaxinfer.pallas_kernels.weights import Weights

PAGE_SIZE = 16
"""Tokens of a page, where a case names no other size."""


def _whole(result: Any, *_args: Any) -> Any:
    return result


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One operation at one shape.

    Attributes:
      op, name: the operation, and a description of the shape.
      call: a function. make: makes its arguments from a random key; traceable.
      traffic: counts the bytes of the minimum memory traffic, from the arguments' shapes.
      flops: FLOPs of its matmuls, two per multiply-add, in the dtype of their operands.
      kernels: the number of Mosaic kernels. others: the number of XLA's own kernels besides.
      rows: tokens, which determine XLA's compiler options.
      operands: the dtype of the matmul's operands.
      state: the argument that the call updates in place and returns as its second result.
      reference: the result in float64, from numpy arrays; leaves after those it returns are not compared.
      compared: makes what is compared from the call's result and the arguments.
      tolerance: maximum error of each result (`numerics.error`), from `tolerances.py`.
    """

    op: str
    name: str
    call: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    traffic: Callable[[tuple[Any, ...]], int]
    flops: int = 0
    kernels: int = 1
    others: int = 0
    rows: int = 1
    operands: str = "bfloat16"
    state: int | None = None
    reference: Callable[..., Any]
    compared: Callable[..., Any] = _whole
    tolerance: float

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """The arguments' shapes."""
        return jax.eval_shape(self.make, jax.eval_shape(jax.random.key, 0))

    @property
    def bytes(self) -> int:
        """The minimum memory traffic."""
        return self.traffic(self.args)

    @property
    def weight_dtype(self) -> np.dtype:
        """The weight dtype that the engine would pass to `compiler_options`."""
        return np.dtype(self.operands)

    @property
    def title(self) -> str:
        """The operation and the shape."""
        return f"{self.op}: {self.name}"


class Heads(NamedTuple):
    """The query heads of an attention, its KV heads, and the size of a head."""

    q: int
    kv: int
    head_dim: int


class StateHeads(NamedTuple):
    """The key heads of a delta rule, its value heads, and the keys and columns of a state; it convolves 4 tokens."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def features(self) -> int:
        """The query, key and values of one key head."""
        return 2 * self.key_dim + self.values // self.keys * self.value_dim


class Choices(NamedTuple):
    """The tokens of an MoE layer, its experts, and how many of them each token chooses."""

    tokens: int
    experts: int
    k: int

    @property
    def rows(self) -> int:
        """The rows of all experts."""
        return self.tokens * self.k


# The shapes of real models


def every_case() -> Iterator[Case]:
    """Yield the cases of real models, grouped by operation."""
    for model, fmt, rows in (
        ("llama3-8b", "bfloat16", 1),
        ("llama3-8b", "bfloat16", 16),
        ("llama3-8b", "int8", 1),
        ("llama3-8b", "int8", 16),
        ("llama3-8b", "int4", 1),
        ("llama3-8b", "int4", 16),
        ("llama3-8b", "fp8", 1),
        ("gpt-j-6b", "bfloat16", 1),
        ("gpt2-1.5b", "bfloat16", 1),
        ("gpt2-1.5b", "int8", 1),
    ):
        yield from _decoder_layer(model, rows, fmt)
    config = preset("llama3-8b")
    for rows in (64, 2048):  # the first linear layer of an MLP, with more rows than the small-batch kernel supports
        name = f"llama3-8b, {rows} rows"
        yield from quantizing(rows, config.embed, name=name)
        yield quantized(rows, 2 * config.layer(0).mlp.hidden, config.embed, name=f"{name}, up")
    for model, batch, tokens, context, dtype in (
        ("llama3-8b", 1, 1, 2048, "bfloat16"),
        ("llama3-8b", 1, 1, 8192, "int8"),
        ("llama3-8b", 8, 1, 8192, "bfloat16"),
        ("llama3-8b", 1, 4, 2048, "bfloat16"),
        ("gpt-j-6b", 1, 1, 2048, "bfloat16"),
        ("gpt-j-6b", 8, 1, 2048, "int8"),
        ("gpt2-1.5b", 1, 1, 1024, "bfloat16"),
    ):
        heads, rotary = _heads(preset(model)), preset(model).layer(0).attention.positions.rotary_dim
        name, int8 = f"{model}, {batch} x {tokens}, context {context}, {dtype}", dtype == "int8"
        yield decoding(batch, tokens, context, heads, rotary=rotary, int8=int8, full=True, name=name)
    for model, tokens, dtype in (
        ("llama3-8b", 2048, "bfloat16"),
        ("llama3-8b", 8192, "int8"),
        ("gpt-j-6b", 2048, "bfloat16"),
        ("gpt-j-6b", 2048, "int8"),
        ("gpt2-1.5b", 1024, "bfloat16"),
    ):
        heads, name = _heads(preset(model)), f"{model}, {tokens} tokens, {dtype}"
        yield prefill(1, tokens, tokens, heads, int8=dtype == "int8", full=True, name=name)
    yield encoding(32, 197, 12, 64, full=True, name="ViT-B/16, 32 x 197")
    for rows in (1, 16):
        yield stepping(rows, StateHeads(16, 32, 128, 128), name=f"Qwen3-Next, {rows} {'row' if rows == 1 else 'rows'}")
    yield prompting([2048], StateHeads(16, 32, 128, 128), others=18, name="Qwen3-Next, 2048 tokens")
    for tokens in (1, 16, 512):
        name = f"Mixtral-8x7B, {tokens} {'token' if tokens == 1 else 'tokens'}"
        choices, embed, hidden = Choices(tokens, experts=8, k=2), 4096, 14_336
        yield gating(choices, name=name)
        yield permuting(choices, embed, name=name)
        yield expert_matmul(choices, 2 * hidden, embed, name=f"{name}, up")
        yield expert_matmul(choices, embed, hidden, name=f"{name}, down")
        yield unpermuting(choices, embed, name=name)
    yield merging(32, 197, 768, r=16, name="ViT-B/16, 32 x 197, 16 merged")


def _decoder_layer(model: str, rows: int, fmt: str) -> Iterator[Case]:
    """Yield the linear layers of a decoder layer, with what is fused into them, and the head."""
    config, heads = preset(model), _heads(preset(model))
    embed, hidden, gated = config.embed, config.layer(0).mlp.hidden, config.layer(0).mlp.gated
    shifted = model != "llama3-8b"

    def name(layer: str) -> str:
        return f"{model} {layer}, {fmt}, {rows} {'row' if rows == 1 else 'rows'}"

    qkv, up = (heads.q + 2 * heads.kv) * heads.head_dim, hidden * (2 if gated else 1)
    fused = {"activation": config.layer(0).mlp.activation.value, "gated": gated}
    yield normed(name("qkv"), rows, qkv, embed, fmt, shifted=shifted)
    yield residual(name("out"), rows, embed, heads.q * heads.head_dim, fmt)
    yield normed(name("up"), rows, up, embed, fmt, shifted=shifted, **fused)
    yield residual(name("down"), rows, embed, hidden, fmt)
    yield linear(name("head"), rows, config.vocab, embed, fmt)


def _heads(config: DecoderConfig) -> Heads:
    return Heads(
        config.layer(0).attention.q_heads, config.layer(0).attention.kv_heads, config.layer(0).attention.head_dim
    )


# Linear layers


def linear(name: str, rows: int, outputs: int, inputs: int, fmt: str) -> Case:
    """Make a case of a linear layer without fusion."""
    return _linear("small_batch_linear", name, rows, outputs, inputs, fmt, small_batch_linear, references.linear)


def normed(
    name: str,
    rows: int,
    outputs: int,
    inputs: int,
    fmt: str,
    *,
    shifted: bool = False,
    biased: bool = False,
    **fused: Any,
) -> Case:
    """Make a case of a linear layer after RMSNorm, or LayerNorm if `shifted`; `fused`: its activation and gate."""

    def call(x: jax.Array, weights: Weights, scale: jax.Array, shift: Any, bias: Any, **options: Any) -> jax.Array:
        return norm_linear(x, scale, shift, weights, bias, **options)

    extra = (inputs,), (inputs,) if shifted else None, (outputs,) if biased else None
    reference, options = references.norm_linear, {"eps": 1e-5} | fused
    return _linear("norm_linear", name, rows, outputs, inputs, fmt, call, reference, *extra, **options)


def residual(name: str, rows: int, outputs: int, inputs: int, fmt: str, *, biased: bool = False) -> Case:
    """Make a case of a linear layer whose result is added to a residual."""
    call, reference, bias = linear_residual, references.linear_residual, (outputs,) if biased else None
    return _linear("linear_residual", name, rows, outputs, inputs, fmt, call, reference, (rows, outputs), bias)


def _linear(
    op: str,
    name: str,
    rows: int,
    outputs: int,
    inputs: int,
    fmt: str,
    call: Callable[..., Any],
    reference: Callable[..., Any],
    *extra: tuple[int, ...] | None,
    **options: Any,
) -> Case:
    """Make a case of a linear layer; `extra`: the shapes of the arguments after rows and weights."""
    dtype = jnp.dtype(fmt if fmt in ("float32", "float16") else "bfloat16")

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, w, *keys = jax.random.split(key, 2 + len(extra))
        rest = [
            None if shape is None else _normal(k, shape, jnp.float32 if len(shape) == 1 else dtype)
            for k, shape in zip(keys, extra, strict=True)
        ]
        return _normal(x, (rows, inputs), dtype), _weights(w, outputs, inputs, fmt), *rest

    others = 1 if outputs % 8 else 0  # slices the result, which TMA writes in rows of a multiple of 16 bytes
    others += 1 if fmt == "int8" and outputs % 64 else 0  # pads the scales to a multiple of TILE_N
    prepared = rows > MAX_RESIDENT_ROWS  # by a kernel before, if they are quantised, or else by XLA
    normalized = prepared and fmt != "int8" and op == "norm_linear"
    others += 1 if normalized or (rows > 8 and rows % 8) else 0  # pads rows to whole tiles, if it does nothing else
    return Case(
        op=op,
        name=name,
        call=functools.partial(call, **options),
        make=make,
        traffic=lambda args: _bytes(args) + rows * outputs * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
        kernels=2 if prepared and fmt == "int8" else 1,
        others=others,
        rows=rows,
        operands="int8" if fmt == "int8" else "bfloat16",
        reference=functools.partial(reference, **options),
        # A normalised row is rounded, and fallbacks also round between the linear layer and what follows it.
        tolerance=tolerance(
            dtype.name,
            roundings=4 if extra else 1,
            products=0 if fmt == "int8" else inputs,
            passes=6 if fmt == "float32" else 1,
        ),
    )


def quantizing(rows: int, inputs: int, *, name: str = "") -> Iterator[Case]:
    """Yield cases of the quantisation of rows to int8, without and with a norm."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, scale = jax.random.split(key)
        return _normal(x, (rows, inputs)), _normal(scale, (inputs,), jnp.float32)

    case = functools.partial(
        Case,
        name=name or f"{rows} x {inputs}",
        kernels=0 if inputs % 128 else 1,  # other rows run as plain XLA
        rows=rows,
        compared=lambda result, *_args: result[0].astype(jnp.float32) * result[1],
        # Both round as the kernel does. Where an error of float32 decides, an element may be a step off, which is of
        # the size of two roundings to bfloat16.
        tolerance=tolerance("bfloat16", roundings=2),
    )
    written = rows * (inputs + 4)
    yield case(
        op="quantize_rows",
        call=quantize_rows,
        make=lambda key: make(key)[:1],
        traffic=lambda args: _bytes(args) + written,
        reference=references.rounded_rows,
    )
    yield case(
        op="norm_quantize",
        call=lambda x, scale: norm_quantize(x, scale, None, eps=1e-5),
        make=make,
        traffic=lambda args: _bytes(args) + written,
        reference=lambda x, scale: references.rounded_rows(references.normalized(x, scale, None, eps=1e-5)),
    )


def quantized(rows: int, outputs: int, inputs: int, *, name: str = "") -> Case:
    """Make a case of the W8A8 matmul."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, w = jax.random.split(key)
        return *formats.quantize_rows(_normal(x, (rows, inputs))), *_weights(w, outputs, inputs, "int8")

    def reference(q: np.ndarray, q_scale: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return (q.astype(np.float64) @ weight.astype(np.float64).T) * q_scale * scale

    return Case(
        op="quantized_matmul",
        name=name or f"{rows} x {inputs} by {outputs}",
        call=functools.partial(quantized_matmul, dtype=jnp.bfloat16),
        make=make,
        traffic=lambda args: _bytes(args) + 2 * rows * outputs,
        flops=2 * rows * outputs * inputs,
        rows=rows,
        operands="int8",
        reference=reference,
        tolerance=tolerance("bfloat16"),
    )


# Attention


def decoding(
    batch: int,
    tokens: int,
    context: int,
    heads: Heads,
    *,
    rotary: int,
    head_norms: bool = False,
    page_size: int = PAGE_SIZE,
    int8: bool = False,
    alibi: bool = False,
    full: bool = False,
    name: str = "",
    **options: Any,
) -> Case:
    """Make a case of decode attention, with rotary embedding and the write to the cache.

    Args:
      head_norms: whether an RMSNorm normalises each query head, and one each key head.
    """
    described = _described(options, alibi=alibi, page_size=page_size, head_norms=head_norms)
    name = name or _attention_name(batch, tokens, context, heads, int8) + described
    options |= {"alibi": _slopes(heads.q)} if alibi else {}
    options |= {"norm_eps": 1e-6} if head_norms else {}
    scale = heads.head_dim**-0.5

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, cache, angle, *norm_keys = jax.random.split(key, 5)
        angles = jax.random.uniform(angle, (batch, tokens, 1, rotary // 2), maxval=6.0)
        qkv = _normal(x, (batch, tokens, (heads.q + 2 * heads.kv) * heads.head_dim))
        cos_sin = (jnp.cos(angles), jnp.sin(angles)) if rotary else None
        norms = tuple(1 + 0.1 * _normal(k, (heads.head_dim,), jnp.float32) for k in norm_keys) if head_norms else None
        pages = _cache(cache, batch, tokens, context, heads, page_size=page_size, int8=int8, full=full)
        return qkv, *pages, cos_sin, norms

    def call(qkv: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array, rotary: Any, norms: Any) -> Any:
        return cached_attention(qkv, pages, table, positions, rotary=rotary, norms=norms, scale=scale, **options)

    return Case(
        op="decode_attention",
        name=name,
        call=call,
        make=make,
        traffic=lambda args: _bytes(args[1]),
        flops=4 * batch * tokens * context * heads.q * heads.head_dim,
        rows=batch * tokens,
        state=1,
        reference=functools.partial(references.decode_attention, scale=scale, **options),
        tolerance=_attention_tolerance(context, heads.head_dim),
    )


def prefill(
    batch: int,
    tokens: int,
    context: int,
    heads: Heads,
    *,
    page_size: int = PAGE_SIZE,
    int8: bool = False,
    alibi: bool = False,
    full: bool = False,
    name: str = "",
    **options: Any,
) -> Case:
    """Make a case of prefill attention: the last chunk of some prompts over their pages."""
    described = _described(options, alibi=alibi, page_size=page_size)
    name = name or _attention_name(batch, tokens, context, heads, int8) + described
    options |= {"alibi": _slopes(heads.q)} if alibi else {}
    scale = heads.head_dim**-0.5

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, cache = jax.random.split(key)
        q = _normal(x, (batch, tokens, heads.q, heads.head_dim))
        return q, *_cache(cache, batch, tokens, context, heads, page_size=page_size, int8=int8, full=full)

    return Case(
        op="paged_attention",
        name=name,
        call=functools.partial(paged_attention, scale=scale, **options),
        make=make,
        traffic=lambda args: _bytes(args) + _bytes(args[0]),
        flops=2 * batch * tokens * (2 * context - tokens) * heads.q * heads.head_dim,
        rows=batch * tokens,
        reference=functools.partial(references.paged_attention, scale=scale, **options),
        tolerance=_attention_tolerance(context, heads.head_dim),
    )


def encoding(
    batch: int, tokens: int, heads: int, head_dim: int, *, merged: bool = False, full: bool = False, name: str = ""
) -> Case:
    """Make a case of encoder attention, where every token sees every other; compiled without cuDNN.

    Args:
      merged: whether keys have sizes. full: whether all rows have `tokens`, not different lengths.
    """
    scale = head_dim**-0.5

    def make(key: jax.Array) -> tuple[Any, ...]:
        q, k, v = (_normal(part, (batch, tokens, heads, head_dim)) for part in jax.random.split(key, 3))
        lengths = _lengths(batch, tokens, 1, full=full)
        index = jnp.arange(tokens, dtype=jnp.int32)
        real = index < lengths[:, None]
        sizes = jnp.where(real, 1.0 + index % 5, 0.0)
        return q, k, v, jnp.where(real, index, -1), sizes if merged else lengths

    def call(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, seen: jax.Array) -> jax.Array:
        lengths, key_sizes = (None, seen) if merged else (seen, None)
        return attention(q, k, v, positions, lengths, key_sizes=key_sizes, scale=scale, causal=False)

    def without_padding(result: jax.Array, *args: jax.Array) -> jax.Array:
        return jnp.where((args[3] >= 0)[..., None, None], result, 0)  # results for padding are arbitrary

    return Case(
        op="attention",
        name=name or f"{batch} x {tokens}, {heads} heads of {head_dim}" + ", sizes" * merged,
        call=call,
        make=make,
        traffic=lambda args: 4 * _bytes(args[0]),
        flops=4 * batch * tokens**2 * heads * head_dim,
        kernels=0 if merged else 1,  # only cuDNN takes sizes
        others=4 if tokens % 8 else 0,  # pads queries, keys and values to a multiple of 8 tokens; slices the result
        rows=batch * tokens,
        reference=functools.partial(references.attention, scale=scale),
        compared=without_padding,
        # cuDNN takes the logarithms of sizes, up to log(5), in bfloat16: exp magnifies their roundings as much.
        tolerance=_attention_tolerance(tokens, head_dim, roundings=7 if merged else 4),
    )


def _cache(
    key: jax.Array, batch: int, tokens: int, context: int, heads: Heads, *, page_size: int, int8: bool, full: bool
) -> tuple[KVPages, jax.Array, jax.Array]:
    """Make random pages, a page table, and the positions of the last tokens of its rows.

    Args:
      full: whether rows are as long as the context, and their pages in order; else they have different lengths, and
        the pages any order.
    """
    k, v, order = jax.random.split(key, 3)
    count = -(-context // page_size)
    pages = [_normal(x, (batch * count, page_size, heads.kv, heads.head_dim)) for x in (k, v)]
    pool = jnp.arange(batch * count) if full else jax.random.permutation(order, batch * count)
    lengths = _lengths(batch, context, max(context // 2, tokens), full=full)
    positions = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)
    cache = KVPages(*pages)
    if int8:
        scales = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(1, 3)) / 127 for x in pages]
        rounded = [jnp.round(x / s[:, None, :, None]).astype(jnp.int8) for x, s in zip(pages, scales, strict=True)]
        cache = KVPages(*rounded, *scales)
    return cache, pool.reshape(batch, count).astype(jnp.int32), positions


def _lengths(rows: int, longest: int, shortest: int, *, full: bool) -> jax.Array:
    """The lengths of rows: all the longest if `full`, else in equal steps down to the shortest."""
    if full:
        return jnp.full(rows, longest, jnp.int32)
    return jnp.linspace(longest, shortest, rows).astype(jnp.int32)


def _attention_tolerance(context: int, head_dim: int, *, roundings: int = 4) -> float:
    """Compute the tolerance of attention.

    Queries, keys, softmax weights and the result are rounded; scores are sums over a head, results over all keys.
    """
    return tolerance("bfloat16", roundings=roundings, products=head_dim + context)


def _slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes, for a power of two of heads."""
    return np.float32(2.0) ** (-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)


def _attention_name(batch: int, tokens: int, context: int, heads: Heads, int8: bool) -> str:
    return f"{batch} x {tokens}, context {context}, {heads.q}/{heads.kv} heads of {heads.head_dim}" + ", int8" * int8


def _described(options: Mapping[str, Any], *, alibi: bool, page_size: int, head_norms: bool = False) -> str:
    """Name the options of an attention that differ from the plain one."""
    described = "".join(f", {name} {value}" for name, value in options.items())
    described += ", ALiBi" * alibi + ", norms of heads" * head_norms
    return described + f", pages of {page_size}" * (page_size != PAGE_SIZE)


# Recurrent states


def stepping(rows: int, heads: StateHeads, *, padding: int = 0, name: str = "") -> Case:
    """Make a case of one token of the gated delta rule in each row, of which the first begins a sequence.

    padding: rows of padding after them.
    """
    positions = np.full((rows + padding, 1), -1, np.int32)
    positions[:rows, 0] = 100 * np.arange(rows)
    case = _delta_rule(positions, np.arange(len(positions)), heads)
    return dataclasses.replace(
        case,
        op="delta_rule_step",
        name=name or f"{rows} rows, {_state_name(heads)}",
        others=5 if len(positions) == 1 else 4,  # convolve in two, or three of one row; store the inputs; e^decay
    )


def prompting(lengths: Sequence[int], heads: StateHeads, *, others: int = 0, name: str = "") -> Case:
    """Make a case of rows of many tokens of the gated delta rule; the last goes on with the sequence of the first.

    lengths: tokens of each row; the first row begins a sequence.
    """
    slots, places = np.arange(len(lengths)), np.arange(max(lengths))
    starts = 100 * slots
    if len(lengths) > 1:
        slots[-1], starts[-1] = 0, lengths[0]
    positions = np.where(places < np.array(lengths)[:, None], starts[:, None] + places, -1).astype(np.int32)
    chunks = len(lengths) * -(-max(lengths) // CHUNK) * heads.values
    # Of the two matrices of a chunk; to join its diagonal blocks; of each 64 columns of a state.
    columns = 2 * CHUNK * (3 * CHUNK * heads.key_dim + 2 * CHUNK**2) * heads.value_dim // CHUNK
    flops = chunks * (2 * 2 * CHUNK**2 * heads.key_dim + 4 * 2 * CHUNK**3 + columns)
    case = _delta_rule(positions, slots, heads)
    return dataclasses.replace(
        case,
        name=name or f"rows of {', '.join(map(str, lengths))} tokens, {_state_name(heads)}",
        flops=6 * flops,  # float32 in bfloat16
        kernels=2,
        others=others,
        tolerance=tolerance("float32", roundings=64, products=heads.key_dim + CHUNK, passes=6),
    )


def _state_name(heads: StateHeads) -> str:
    return f"{heads.keys}/{heads.values} heads of {heads.key_dim} x {heads.value_dim}"


def _delta_rule(positions: np.ndarray, slots: np.ndarray, heads: StateHeads) -> Case:
    """Make a case of rows at these positions, int32 [B, T], and of slots with these numbers, in any order."""
    rows, tokens = positions.shape
    count = len(slots) + 1

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, decay, beta, weight, conv, state, order = jax.random.split(key, 7)
        return (
            _normal(x, (rows, tokens, heads.keys, heads.features)),
            -jax.random.exponential(decay, (rows, tokens, heads.values)),
            jax.random.uniform(beta, (rows, tokens, heads.values)),
            _normal(weight, (heads.keys, heads.features, 4), jnp.float32),
            RecurrentState(
                _normal(conv, (count, 3, heads.keys, heads.features)),
                _normal(state, (count, heads.values, heads.key_dim, heads.value_dim), jnp.float32),
            ),
            jax.random.permutation(order, count)[slots].astype(jnp.int32),
            jnp.asarray(positions),
        )

    def compared(result: Any, *args: Any) -> Any:
        output, cache = result
        return jnp.where((positions >= 0)[..., None, None], output, 0.0), cache

    moved = len(np.unique(slots))
    return Case(
        op="gated_delta_rule",
        name="",
        call=functools.partial(gated_delta_rule, key_dim=heads.key_dim),
        make=make,
        traffic=lambda args: (
            _bytes(args[:4]) + 2 * _bytes(args[4]) * moved // count + 4 * rows * tokens * heads.values * heads.value_dim
        ),
        rows=rows * tokens,
        state=4,
        reference=functools.partial(references.gated_delta_rule, key_dim=heads.key_dim),
        compared=compared,
        # exp, silu and the norms of queries and keys are a few roundings each.
        tolerance=tolerance("float32", roundings=64, products=heads.key_dim),
    )


# Mixtures of experts


def gating(choices: Choices, *, capacity: int | None = None, name: str = "") -> Case:
    """Make a case of the choice of experts; those beyond an expert's capacity are dropped."""
    tokens, experts, k = choices

    def make(key: jax.Array) -> tuple[Any, ...]:
        return (_normal(key, (tokens, experts), jnp.float32),)

    return Case(
        op="top_k_gating",
        name=name or _choices_name(choices) + ("" if capacity is None else f", capacity {capacity}"),
        call=functools.partial(moe.top_k_gating, k=k, capacity=capacity),
        make=make,
        traffic=lambda _args: 4 * (tokens * experts + 4 * choices.rows + 2 * experts),  # the logits, and a Routing
        kernels=1 if tokens <= 64 else 2,
        rows=tokens,
        reference=functools.partial(references.top_k_gating, k=k, capacity=capacity),
        tolerance=tolerance("float32", roundings=64, products=experts),  # exp of up to 8 magnifies errors 8 times
    )


def permuting(choices: Choices, embed: int, *, name: str = "") -> Case:
    """Make a case of the copy of tokens to the rows of their experts."""
    make = _routed(choices, choices.tokens, embed)
    return Case(
        op="permute",
        name=name or _choices_name(choices),
        call=moe.permute,
        make=make,
        traffic=lambda _args: 2 * 2 * choices.rows * embed,
        rows=choices.tokens,
        reference=references.permute,
        tolerance=tolerance("float64"),  # copies
    )


def unpermuting(choices: Choices, embed: int, *, name: str = "") -> Case:
    """Make a case of the weighted sum of the rows of each token."""
    make = _routed(choices, choices.rows, embed)
    return Case(
        op="unpermute",
        name=name or _choices_name(choices),
        call=moe.unpermute,
        make=make,
        traffic=lambda _args: 2 * (choices.rows + choices.tokens) * embed,
        rows=choices.tokens,
        reference=references.unpermute,
        tolerance=tolerance("bfloat16", products=choices.k),
    )


def expert_matmul(choices: Choices, outputs: int, inputs: int, *, name: str = "") -> Case:
    """Make a case of a linear layer with a matrix for each expert."""
    (tokens, experts, _), rows = choices, choices.rows

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, routing = _routed(choices, rows, inputs)(key)
        weights = _normal(jax.random.fold_in(key, 1), (experts, outputs, inputs), scale=inputs**-0.5)
        return x, Weights(weights), routing.offsets, routing.sizes

    return Case(
        op="grouped_matmul",
        name=name or _choices_name(choices),
        call=moe.grouped_matmul,
        make=make,
        traffic=lambda _args: 2 * (min(experts, rows) * outputs * inputs + rows * (inputs + outputs)),
        flops=2 * rows * outputs * inputs,
        others=1 if rows % 8 else 0,  # pads rows to a multiple of 8
        rows=tokens,
        reference=references.grouped_matmul,
        tolerance=tolerance("bfloat16", products=inputs),
    )


def _routed(choices: Choices, count: int, width: int) -> Callable[[jax.Array], tuple[jax.Array, moe.Routing]]:
    """Return what makes `count` random rows, and the routing of random logits."""

    def make(key: jax.Array) -> tuple[jax.Array, moe.Routing]:
        x, logits = jax.random.split(key)
        with without_kernels():
            routing = moe.top_k_gating(_normal(logits, (choices.tokens, choices.experts), jnp.float32), choices.k)
        return _normal(x, (count, width)), routing

    return make


def _choices_name(choices: Choices) -> str:
    return f"{choices.tokens} tokens, {choices.k} of {choices.experts} experts"


# Token merging


def merging(batch: int, tokens: int, embed: int, *, r: int, padding: bool = False, name: str = "") -> Case:
    """Make a case of token merging.

    The metric's elements are 1 and -1, so that similarities are exact in every dtype: the choice of pairs depends on no
    rounding, and ties are frequent.

    Args:
      padding: whether rows end in 0, 1, 2, ... tokens of size 0.
    """

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, metric = jax.random.split(key)
        sizes = 1.0 + jnp.arange(batch * tokens, dtype=jnp.float32).reshape(batch, tokens) % 3
        if padding:
            sizes = jnp.where(jnp.arange(tokens) < tokens - jnp.arange(batch)[:, None], sizes, 0.0)
        signs = jax.random.rademacher(metric, (batch, tokens, 64), jnp.bfloat16)
        return _normal(x, (batch, tokens, embed)), sizes, signs

    return Case(
        op="merge_tokens",
        name=name or f"{batch} x {tokens} x {embed}, {r} merged" + ", padding" * padding,
        call=functools.partial(merge_tokens, r=r),
        make=make,
        traffic=lambda args: _bytes(args) + 2 * batch * (tokens - r) * embed,
        kernels=2,
        others=4,  # normalises and pads the metric's even and odd rows; pads and slices the sizes
        rows=batch * tokens,
        reference=functools.partial(references.merge_tokens, r=r),
        tolerance=tolerance("bfloat16", products=tokens),
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _weights(key: jax.Array, outputs: int, inputs: int, fmt: str) -> Weights:
    """Make random weights, scaled such that outputs for normal inputs are about normal."""
    matrix = _normal(key, (outputs, inputs), jnp.float32, inputs**-0.5)
    return formats.quantize(matrix, fmt) if fmt in ("int8", "int4", "fp8") else Weights(matrix.astype(fmt))


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
