"""Every operation with a kernel, at the shapes of real models: the cases that are lowered, compiled and tabulated.

Cases have shapes only, no data. A case states how many kernels its call takes, how many bytes it must move and how many
FLOPs its matmuls have. Dimension letters are those of the operations' modules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import DecoderConfig
from jaxinfer.models.presets import preset
from jaxinfer.pallas_kernels import (
    KVPages,
    attention,
    cached_attention,
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
from jaxinfer.pallas_kernels.weights import GROUP, NIBBLES, Weights

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape.

    Attributes:
      op, name: the operation, and a description of the shape.
      call, args: a function, and the shapes of its arguments.
      bytes: the minimum memory traffic. flops: bfloat16 FLOPs; an int8 operation counts half.
      kernels: the number of Mosaic kernels. others: the number of XLA's own kernels besides.
      rows: tokens, which determine XLA's compiler options.
      donated: the argument that the call updates in place.
    """

    op: str
    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    bytes: int
    flops: int = 0
    kernels: int = 1
    others: int = 0
    rows: int = 1
    donated: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.op}: {self.name}"


def every_case() -> Iterator[Case]:
    """Yield all cases, grouped by operation."""
    for model, fmt, rows in (
        ("llama3-8b", "bfloat16", 1),
        ("llama3-8b", "bfloat16", 16),
        ("llama3-8b", "int8", 1),
        ("llama3-8b", "int4", 1),
        ("llama3-8b", "int4", 16),
        ("llama3-8b", "fp8", 1),
        ("gpt-j-6b", "bfloat16", 1),
        ("gpt2-1.5b", "bfloat16", 1),
        ("gpt2-1.5b", "int8", 1),
    ):
        yield from linear_layers(model, rows, fmt)
    for rows in (64, 2048):
        yield from quantized("llama3-8b", rows)
    for model, batch, tokens, context, dtype in (
        ("llama3-8b", 1, 1, 2048, "bfloat16"),
        ("llama3-8b", 1, 1, 8192, "int8"),
        ("llama3-8b", 8, 1, 8192, "bfloat16"),
        ("llama3-8b", 1, 4, 2048, "bfloat16"),
        ("gpt-j-6b", 1, 1, 2048, "bfloat16"),
        ("gpt-j-6b", 8, 1, 2048, "int8"),
        ("gpt2-1.5b", 1, 1, 1024, "bfloat16"),
    ):
        yield decode(model, batch, tokens, context, dtype)
    for model, tokens, dtype in (
        ("llama3-8b", 2048, "bfloat16"),
        ("llama3-8b", 8192, "int8"),
        ("gpt-j-6b", 2048, "bfloat16"),
        ("gpt-j-6b", 2048, "int8"),
        ("gpt2-1.5b", 1024, "bfloat16"),
    ):
        yield prefill(model, tokens, dtype)
    yield encode("ViT-B/16", 32, 197, 12, 64)
    for tokens in (1, 16, 512):
        yield from experts("Mixtral-8x7B", tokens, experts=8, k=2, embed=4096, hidden=14_336)
    yield merge("ViT-B/16", 32, 197, 768, r=16)


def linear_layers(model: str, rows: int, fmt: str) -> Iterator[Case]:
    """Yield the linear layers of a decoder layer, with the operations fused into them, and the head."""
    config = preset(model)
    embed, hidden, gated = config.embed, config.mlp.hidden, config.mlp.gated
    heads, kv = _heads(config)
    norm = _float((embed,), "float32"), None if model == "llama3-8b" else _float((embed,), "float32")
    fused = {"activation": config.mlp.activation.value, "gated": gated}
    residual = _float((rows, embed))

    def case(op: str, name: str, call: Callable, x: int, outputs: int, *extra: Any, others: int = 0) -> Case:
        args = _float((rows, x)), _weights(outputs, x, fmt), *extra
        return Case(
            op=op,
            name=f"{model} {name}, {fmt}, {rows} {'row' if rows == 1 else 'rows'}",
            call=call,
            args=args,
            bytes=_bytes(args) + 2 * rows * outputs,
            flops=2 * rows * outputs * x,
            others=others,
            rows=rows,
        )

    def normed(x: jax.Array, weights: Weights, norm: Any, **fused: Any) -> jax.Array:
        scale, shift = norm
        return norm_linear(x, scale, shift, weights, eps=1e-5, **fused)

    yield case("norm_linear", "qkv", normed, embed, heads + 2 * kv, norm)
    yield case("linear_residual", "out", linear_residual, heads, embed, residual)
    up = functools.partial(normed, **fused)
    yield case("norm_linear", "up", up, embed, hidden * (2 if gated else 1), norm)
    yield case("linear_residual", "down", linear_residual, hidden, embed, residual)
    others = 1 if config.vocab % 8 else 0  # slices the result, which TMA writes in rows of a multiple of 16 bytes
    others += 1 if fmt == "int8" and config.vocab % 64 else 0  # pads the scales to a multiple of TILE_N
    yield case("small_batch_linear", "head", small_batch_linear, embed, config.vocab, others=others)


def quantized(model: str, rows: int) -> Iterator[Case]:
    """Yield the first linear layer of an MLP in int8, with more rows than the small-batch kernel supports."""
    config = preset(model)
    inputs, outputs = config.embed, 2 * config.mlp.hidden
    x, norm = _float((rows, inputs)), _float((inputs,), "float32")
    q, q_scale = _float((rows, inputs), "int8"), _float((rows, 1), "float32")
    weights = _weights(outputs, inputs, "int8")
    case = functools.partial(Case, rows=rows)
    name = f"{model}, {rows} rows"
    yield case(op="quantize_rows", name=name, call=quantize_rows, args=(x,), bytes=_bytes((x, q, q_scale)))

    def normed(x: jax.Array, norm: jax.Array) -> Any:
        return norm_quantize(x, norm, None, eps=1e-5)

    yield case(op="norm_quantize", name=name, call=normed, args=(x, norm), bytes=_bytes((x, q, q_scale, norm)))
    args = q, q_scale, *weights
    yield case(
        op="quantized_matmul",
        name=f"{name}, up",
        call=functools.partial(quantized_matmul, dtype=x.dtype),
        args=args,
        bytes=_bytes(args) + 2 * rows * outputs,
        flops=rows * outputs * inputs,  # half, since int8 has twice the rate of bfloat16
    )


def decode(model: str, batch: int, tokens: int, context: int, dtype: str) -> Case:
    """Make a case of decode attention: the newest tokens of some rows over their pages."""
    config = preset(model)
    attention, (heads, kv) = config.attention, _heads(config)
    rotary = config.positions.rotary_dim or 0
    angles = _float((batch, tokens, 1, rotary // 2), "float32")
    pages = _pages(config, batch * context, dtype)

    def call(qkv: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array, rotary: Any) -> Any:
        return cached_attention(qkv, pages, table, positions, rotary=rotary, scale=attention.head_dim**-0.5)

    return Case(
        op="decode_attention",
        name=f"{model}, {batch} x {tokens}, context {context}, {dtype}",
        call=call,
        args=(
            _float((batch, tokens, heads + 2 * kv)),
            pages,
            _integers(batch, context // PAGE_SIZE),
            _integers(batch, tokens),
            (angles, angles) if rotary else None,
        ),
        bytes=_bytes(pages),
        flops=4 * batch * tokens * context * heads,
        rows=batch * tokens,
        donated=(1,),
    )


def prefill(model: str, tokens: int, dtype: str) -> Case:
    """Make a case of prefill attention: a prompt over its pages."""
    config = preset(model)
    attention, (heads, _) = config.attention, _heads(config)
    args = (
        _float((1, tokens, attention.q_heads, attention.head_dim)),
        _pages(config, tokens, dtype),
        _integers(1, tokens // PAGE_SIZE),
        _integers(1, tokens),
    )
    return Case(
        op="paged_attention",
        name=f"{model}, {tokens} tokens, {dtype}",
        call=functools.partial(paged_attention, scale=attention.head_dim**-0.5),
        args=args,
        bytes=_bytes(args) + 2 * tokens * heads,
        flops=2 * tokens**2 * heads,
        rows=tokens,
    )


def encode(model: str, batch: int, tokens: int, heads: int, head_dim: int) -> Case:
    """Make a case of encoder attention, where every token sees every other; compiled without cuDNN."""
    q = _float((batch, tokens, heads, head_dim))
    return Case(
        op="attention",
        name=f"{model}, {batch} x {tokens}",
        call=functools.partial(attention, scale=head_dim**-0.5, causal=False),
        args=(q, q, q, _integers(batch, tokens), _integers(batch)),
        bytes=4 * _bytes(q),
        flops=4 * batch * tokens**2 * heads * head_dim,
        others=4,  # pads queries, keys and values to a multiple of 8 tokens; slices the result
        rows=batch * tokens,
    )


def experts(model: str, tokens: int, *, experts: int, k: int, embed: int, hidden: int) -> Iterator[Case]:
    """Yield the operations of an MoE layer."""
    rows = tokens * k
    name = f"{model}, {tokens} {'token' if tokens == 1 else 'tokens'}"
    routing = moe.Routing(
        experts=_integers(tokens, k),
        weights=_float((tokens, k), "float32"),
        rows=_integers(tokens, k),
        tokens=_integers(rows),
        offsets=_integers(experts),
        sizes=_integers(experts),
    )
    logits, x, y = _float((tokens, experts), "float32"), _float((tokens, embed)), _float((rows, embed))
    case = functools.partial(Case, rows=tokens)
    yield case(
        op="top_k_gating",
        name=name,
        call=functools.partial(moe.top_k_gating, k=k),
        args=(logits,),
        bytes=_bytes((logits, routing)),
        kernels=1 if tokens <= 64 else 2,
    )
    yield case(op="permute", name=name, call=moe.permute, args=(x, routing), bytes=_bytes(y) * 2)
    for projection, outputs, inputs in (("up", 2 * hidden, embed), ("down", embed, hidden)):
        weights = _float((experts, outputs, inputs))
        read = _bytes(weights) * min(experts, rows) // experts
        yield case(
            op="grouped_matmul",
            name=f"{name}, {projection}",
            call=moe.grouped_matmul,
            args=(_float((rows, inputs)), weights, routing.offsets, routing.sizes),
            bytes=read + 2 * rows * (inputs + outputs),
            flops=2 * rows * outputs * inputs,
            others=1 if rows % 8 else 0,  # pads rows to a multiple of 8
        )
    yield case(op="unpermute", name=name, call=moe.unpermute, args=(y, routing), bytes=_bytes((y, x)))


def merge(model: str, batch: int, tokens: int, embed: int, *, r: int) -> Case:
    x, sizes, metric = _float((batch, tokens, embed)), _float((batch, tokens), "float32"), _float((batch, tokens, 64))
    return Case(
        op="merge_tokens",
        name=f"{model}, {batch} x {tokens}, {r} merged",
        call=functools.partial(merge_tokens, r=r),
        args=(x, sizes, metric),
        bytes=_bytes((x, sizes, metric)) + 2 * batch * (tokens - r) * embed,
        kernels=2,
        others=4,  # normalises and pads the metric's even and odd rows; pads and slices the sizes
        rows=batch * tokens,
    )


def _heads(config: DecoderConfig) -> tuple[int, int]:
    """Return the total features of the query heads, and of the KV heads."""
    attention = config.attention
    return attention.q_heads * attention.head_dim, attention.kv_heads * attention.head_dim


def _float(shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _weights(outputs: int, inputs: int, fmt: str) -> Weights:
    match fmt:
        case "int8":
            return Weights(_float((outputs, inputs), "int8"), _float((outputs,), "float32"))
        case "fp8":
            return Weights(_float((outputs, inputs), "float8_e4m3fn"), _float((outputs,), "float32"))
        case "int4":
            return Weights(_float((outputs, inputs // NIBBLES), "uint16"), _float((inputs // GROUP, outputs)))
        case _:
            return Weights(_float((outputs, inputs), fmt))


def _pages(config: DecoderConfig, tokens: int, dtype: str) -> KVPages:
    kv_heads, head_dim = config.attention.kv_heads, config.attention.head_dim
    count = tokens // PAGE_SIZE
    return KVPages.shapes(count, PAGE_SIZE, kv_heads, head_dim, np.dtype(jnp.bfloat16), int8=dtype == "int8")


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
