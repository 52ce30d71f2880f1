"""Every operation at the shapes at which it is timed, tuned and checked.

Timing and tuning use the cases of `kernel_cases.py`, which count bytes and FLOPs, filled with random data. Numerics
are checked at other shapes, small or awkward, against float64 (`references.py`). Dimension letters are those of the
operations' modules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_cases
from benchmarks.gpu import references
from benchmarks.gpu.others import cudnn_prefill, jax_ragged_dot, tokamax_prefill, tokamax_ragged_dot
from benchmarks.gpu.tolerances import tolerance
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
from jaxinfer.pallas_kernels import weights as formats
from jaxinfer.pallas_kernels.dispatch import without_kernels
from jaxinfer.pallas_kernels.weights import Weights


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One operation at one shape.

    Attributes:
      op: the operation's name. name: a description of the shape.
      make: makes the arguments from a random key; traceable.
      call: calls the operation with these arguments.
      bytes, flops: the minimum memory traffic and FLOPs of a call. operands: the dtype of its matmul operands.
      rows: tokens, which determine XLA's compiler options.
      state: the argument that the operation updates in place and returns as its second result.
      others: other libraries' JAX implementations with the same arguments. torch: the request for PyTorch's process.
      reference: the result in float64, from numpy arrays; leaves after those it returns are not compared.
      tolerance: maximum error of each result (`numerics.error`), from `tolerances.py`.
    """

    op: str
    name: str
    make: Callable[[jax.Array], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes: int = 1
    flops: int = 0
    operands: str = "bfloat16"
    rows: int = 1
    state: int | None = None
    others: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    torch: Mapping[str, Any] | None = None
    reference: Callable[..., Any] | None = None
    tolerance: float = 0.0

    @functools.cached_property
    def shapes(self) -> tuple[Any, ...]:
        """The arguments' shapes."""
        return jax.eval_shape(self.make, jax.random.key(0))

    @property
    def weight_dtype(self) -> np.dtype:
        """The weight dtype that the engine would pass to `compiler_options`."""
        return np.dtype(self.operands)

    @property
    def title(self) -> str:
        return f"{self.op}: {self.name}"


# Timed and tuned


def timed(*, quick: bool) -> Iterator[Case]:
    """Yield the cases of `kernel_cases`, those of one row first; quick: one row of one model only."""
    ordered = sorted(kernel_cases.every_case(), key=lambda case: case.rows > 1)
    for case in ordered:
        if not quick or (case.name.startswith("llama3-8b") and case.rows == 1):
            yield with_data(case)


def with_data(case: kernel_cases.Case) -> Case:
    """Fill a case of shapes with random data."""
    int8_weight = next((x for x in jax.tree.leaves(case.args) if x.dtype == jnp.int8 and len(x.shape) == 2), None)
    return Case(
        op=case.op,
        name=case.name,
        make=functools.partial(_fill, case),
        call=case.call,
        bytes=case.bytes,
        flops=case.flops,
        operands="bfloat16" if int8_weight is None else "int8",
        rows=case.rows,
        state=case.donated[0] if case.donated else None,
        others=_OTHERS.get(case.op, {}),
        torch=_torch(case),
    )


def _fill(case: kernel_cases.Case, key: jax.Array) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(case.args)
    keys = jax.random.split(key, len(leaves) + 1)
    args = tree.unflatten([_random(k, x.shape, x.dtype) for k, x in zip(keys[1:], leaves, strict=True)])
    return _INTEGERS.get(case.op, lambda _, args: args)(keys[0], args)


def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draw normal floats, or random bits; meaningful integers (tables, positions) are filled in later."""
    if jnp.issubdtype(dtype, jnp.floating):
        return _normal(key, shape, dtype)
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, f"uint{8 * size}"), dtype)


def _paged(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fill in a page table in order, and the last positions of its pages."""
    x, pages, table, positions, *rest = args
    last = table.shape[1] * pages.k.shape[1]
    table = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    tokens = jnp.arange(last - positions.shape[1], last, dtype=jnp.int32)
    return x, pages, table, jnp.broadcast_to(tokens, positions.shape), *rest


def _whole_rows(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, positions, lengths = args
    return q, k, v, jnp.broadcast_to(jnp.arange(q.shape[1]), positions.shape), jnp.full_like(lengths, k.shape[1])


def _sized(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Draw sizes of 1 to 3 original tokens."""
    x, size, metric = args
    return x, jax.random.randint(key, size.shape, 1, 4).astype(size.dtype), metric


def _routed(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Route by random logits, in place of a Routing or of its last two fields."""
    x, second, *_ = args
    if isinstance(second, moe.Routing):
        (tokens, k), experts = second.experts.shape, len(second.sizes)
        return x, _routing(key, tokens, experts, k)
    routing = _routing(key, len(x), len(second), 1)  # each row is a token with one expert
    return x, second, routing.offsets, routing.sizes


def _routing(key: jax.Array, tokens: int, experts: int, k: int) -> moe.Routing:
    with without_kernels():
        return moe.top_k_gating(_normal(key, (tokens, experts), jnp.float32), k)


_INTEGERS: Mapping[str, Callable[[jax.Array, tuple[Any, ...]], tuple[Any, ...]]] = {
    "decode_attention": _paged,
    "paged_attention": _paged,
    "attention": _whole_rows,
    "merge_tokens": _sized,
    "permute": _routed,
    "unpermute": _routed,
    "grouped_matmul": _routed,
}
_OTHERS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "paged_attention": {"cuDNN": cudnn_prefill, "tokamax": tokamax_prefill},
    "grouped_matmul": {"ragged_dot": jax_ragged_dot, "tokamax": tokamax_ragged_dot},
}


def _torch(case: kernel_cases.Case) -> dict[str, Any] | None:
    """Make the request for PyTorch's nearest: linear layers without fusion, attention over contiguous keys."""
    weights = next((x for x in case.args if isinstance(x, Weights)), None)
    if weights is not None:
        outputs, inputs = weights.shape
        fmt = {"uint16": "int4"}.get(weights.weight.dtype.name, weights.weight.dtype.name)
        if fmt not in ("bfloat16", "int8", "int4"):
            return None
        return {"what": "linear", "weights": fmt, "rows": case.rows, "outputs": outputs, "inputs": inputs}
    pages = next((x for x in case.args if isinstance(x, KVPages)), None)
    if pages is not None and pages.k_scale is None:
        x, table, positions = case.args[0], case.args[2], case.args[3]
        kv_heads, head_dim = pages.k.shape[2:]
        heads = math.prod(x.shape[2:]) // head_dim
        return {
            "what": "attention",
            "batch": len(x),
            "tokens": positions.shape[1],
            "keys": table.shape[1] * pages.k.shape[1],
            "q_heads": heads if x.ndim == 4 else heads - 2 * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }
    return None


# Checked


_VARIANTS: tuple[dict[str, Any], ...] = ({"int8": True}, {"alibi": True})
"""Options of attention besides the plain one: over int8 pages, and with ALiBi."""


def checked() -> Iterator[Case]:
    """Yield shapes for numerics: common ones, and ones that tiles do not divide."""
    for fmt in ("bfloat16", "float16", "float32", "int8", "int4", "fp8"):
        for rows, outputs, inputs in ((1, 4096, 4096), (3, 1600, 1600), (8, 1024, 6400), (16, 6144, 4096)):
            if fmt != "int4" or inputs % formats.GROUP == 0:
                yield from linear_layers(rows, outputs, inputs, fmt)
    options: dict[str, Any]
    for options in ({}, {"window": 100}, {"softcap": 30.0}):
        for batch, tokens, context in ((1, 1, 1024), (3, 1, 777), (2, 4, 333)):
            yield decoding(batch, tokens, context, q_heads=32, kv_heads=8, head_dim=128, rotary=128, **options)
            yield prefill(batch, 16 * tokens, context, q_heads=16, kv_heads=16, head_dim=64, **options)
    yield decoding(2, 1, 500, q_heads=16, kv_heads=16, head_dim=256, rotary=64)
    for options in _VARIANTS:
        yield decoding(3, 1, 777, q_heads=32, kv_heads=8, head_dim=128, rotary=128, **options)
        yield decoding(2, 4, 333, q_heads=32, kv_heads=8, head_dim=128, rotary=128, **options)
        yield prefill(3, 16, 777, q_heads=32, kv_heads=8, head_dim=128, **options)
    yield encoding(4, 197, heads=12, head_dim=64, merged=True)  # cuDNN, or plain XLA
    yield encoding(4, 197, heads=12, head_dim=64)
    for rows, inputs in ((1, 4096), (7, 1600), (64, 14_336)):
        yield from quantizing(rows, inputs)
    for rows, outputs, inputs in ((32, 1024, 1600), (200, 4096, 4096)):
        yield quantized(rows, outputs, inputs)
    for tokens in (1, 16, 100):
        yield from experts(tokens, experts=8, k=2, embed=1024, hidden=512)
    yield merging(4, 197, 768, r=16, padding=True)
    yield merging(4, 197, 768, r=16)


def tiny() -> Iterator[Case]:
    """Yield one small case of each kind, for a dry run."""
    for fmt in ("bfloat16", "int8", "int4"):
        first, *others = linear_layers(2, 64, 128, fmt)
        yield from (first, *others) if fmt == "bfloat16" else (first,)
    yield decoding(1, 1, 40, q_heads=2, kv_heads=1, head_dim=64, rotary=64)
    yield prefill(1, 8, 40, q_heads=2, kv_heads=1, head_dim=64)
    for options in _VARIANTS:
        yield decoding(1, 1, 40, q_heads=2, kv_heads=1, head_dim=64, rotary=64, **options)
        yield prefill(1, 8, 40, q_heads=2, kv_heads=1, head_dim=64, **options)
    yield encoding(1, 8, heads=1, head_dim=64, merged=True)
    yield encoding(1, 8, heads=1, head_dim=64)
    yield from quantizing(2, 128)
    yield quantized(32, 64, 128)
    yield from experts(4, experts=4, k=2, embed=64, hidden=64)
    yield merging(3, 16, 64, r=3, padding=True)
    yield merging(1, 16, 64, r=3)


def tiny_timed() -> Iterator[Case]:
    """Yield a linear layer and an attention with their peers, for a dry run."""
    request = {"what": "linear", "weights": "bfloat16", "rows": 2, "outputs": 64, "inputs": 128}
    yield dataclasses.replace(next(linear_layers(2, 64, 128, "bfloat16")), torch=request)
    yield dataclasses.replace(
        prefill(1, 8, 16, q_heads=1, kv_heads=1, head_dim=64),
        others=_OTHERS["paged_attention"],
        torch={"what": "attention", "batch": 1, "tokens": 8, "keys": 16, "q_heads": 1, "kv_heads": 1, "head_dim": 64},
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _weights(key: jax.Array, outputs: int, inputs: int, fmt: str) -> Weights:
    """Make random weights, scaled such that outputs for normal inputs are about normal."""
    matrix = _normal(key, (outputs, inputs), jnp.float32, inputs**-0.5)
    return formats.quantize(matrix, fmt) if fmt in ("int8", "int4", "fp8") else Weights(matrix.astype(fmt))


def linear_layers(rows: int, outputs: int, inputs: int, fmt: str) -> Iterator[Case]:
    """Yield a linear layer with different fusions.

    None; LayerNorm and GELU; RMSNorm and a gate; a bias and a residual.
    """
    dtype = jnp.dtype(fmt if fmt in ("float32", "float16") else "bfloat16")
    name = f"{rows} x {inputs} by {outputs}, {fmt}"

    def case(op: str, what: str, call: Callable, reference: Callable, *extra: tuple[int, ...], **options: Any) -> Case:
        def make(key: jax.Array) -> tuple[Any, ...]:
            x, w, *keys = jax.random.split(key, 2 + len(extra))
            vectors = [
                _normal(k, shape, jnp.float32 if len(shape) == 1 else dtype)
                for k, shape in zip(keys, extra, strict=True)
            ]
            return _normal(x, (rows, inputs), dtype), _weights(w, outputs, inputs, fmt), *vectors

        return Case(
            op=op,
            name=name + what,
            make=make,
            call=functools.partial(call, **options),
            reference=functools.partial(reference, **options),
            operands="int8" if fmt == "int8" else "bfloat16",
            rows=rows,
            # A normalised row is rounded, and fallbacks also round between the linear layer and what follows it.
            tolerance=tolerance(
                dtype.name,
                roundings=4 if extra else 1,
                products=0 if fmt == "int8" else inputs,
                passes=6 if fmt == "float32" else 1,
            ),
        )

    def normed(x: jax.Array, weights: Weights, scale: jax.Array, *rest: jax.Array, **options: Any) -> jax.Array:
        shift, bias = rest or (None, None)
        return norm_linear(x, scale, shift, weights, bias, **options)

    yield case("small_batch_linear", "", small_batch_linear, references.linear)
    gelu = {"eps": 1e-5, "activation": "gelu_tanh"}
    yield case("norm_linear", ", GELU", normed, references.norm_linear, (inputs,), (inputs,), (outputs,), **gelu)
    gate = {"eps": 1e-5, "activation": "silu", "gated": True}
    yield case("norm_linear", ", gated", normed, references.norm_linear, (inputs,), **gate)

    def residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array) -> jax.Array:
        return linear_residual(x, weights, residual, bias)

    yield case("linear_residual", "", residual, references.linear_residual, (rows, outputs), (outputs,))


PAGE_SIZE = 16


def _cache(
    key: jax.Array, batch: int, context: int, kv_heads: int, head_dim: int, *, int8: bool
) -> tuple[KVPages, jax.Array]:
    """Make random pages and a shuffled page table."""
    k, v, order = jax.random.split(key, 3)
    count = -(-context // PAGE_SIZE)
    pages = [_normal(x, (batch * count, PAGE_SIZE, kv_heads, head_dim)) for x in (k, v)]
    table = jax.random.permutation(order, batch * count).reshape(batch, count).astype(jnp.int32)
    if not int8:
        return KVPages(*pages), table
    scales = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(1, 3)) / 127 for x in pages]
    k, v = (jnp.round(x / scale[:, None, :, None]).astype(jnp.int8) for x, scale in zip(pages, scales, strict=True))
    return KVPages(k, v, *scales), table


def _attention_tolerance(context: int, head_dim: int, *, roundings: int = 4) -> float:
    """Compute the tolerance of attention.

    Queries, keys, softmax weights and the result are rounded; scores are sums over a head, results over all keys.
    """
    return tolerance("bfloat16", roundings=roundings, products=head_dim + context)


def _positions(batch: int, tokens: int, context: int) -> jax.Array:
    """Return the last positions of rows of different lengths."""
    lengths = jnp.linspace(context, max(context // 2, tokens), batch).astype(jnp.int32)
    return lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)


def decoding(
    batch: int,
    tokens: int,
    context: int,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    int8: bool = False,
    alibi: bool = False,
    **options: Any,
) -> Case:
    """Make a case of decode attention, with rotary embedding and the write to the cache."""
    options |= {"alibi": _slopes(q_heads)} if alibi else {}

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, cache, angle = jax.random.split(key, 3)
        angles = jax.random.uniform(angle, (batch, tokens, 1, rotary // 2), maxval=6.0)
        qkv = _normal(x, (batch, tokens, (q_heads + 2 * kv_heads) * head_dim))
        cos_sin = (jnp.cos(angles), jnp.sin(angles))
        pages, table = _cache(cache, batch, context, kv_heads, head_dim, int8=int8)
        return qkv, pages, table, _positions(batch, tokens, context), cos_sin

    def call(qkv: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array, rotary: Any) -> Any:
        return cached_attention(qkv, pages, table, positions, rotary=rotary, scale=head_dim**-0.5, **options)

    return Case(
        op="decode_attention",
        name=_attention_name(batch, tokens, context, q_heads, kv_heads, head_dim, int8, options),
        make=make,
        call=call,
        reference=functools.partial(references.decode_attention, scale=head_dim**-0.5, **options),
        tolerance=_attention_tolerance(context, head_dim),
        rows=batch * tokens,
        state=1,
    )


def prefill(
    batch: int,
    tokens: int,
    context: int,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    int8: bool = False,
    alibi: bool = False,
    **options: Any,
) -> Case:
    """Make a case of prefill attention: the last chunk of some prompts over their pages."""
    options |= {"alibi": _slopes(q_heads)} if alibi else {}

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, cache = jax.random.split(key)
        q = _normal(x, (batch, tokens, q_heads, head_dim))
        return q, *_cache(cache, batch, context, kv_heads, head_dim, int8=int8), _positions(batch, tokens, context)

    return Case(
        op="paged_attention",
        name=_attention_name(batch, tokens, context, q_heads, kv_heads, head_dim, int8, options),
        make=make,
        call=functools.partial(paged_attention, scale=head_dim**-0.5, **options),
        reference=functools.partial(references.paged_attention, scale=head_dim**-0.5, **options),
        tolerance=_attention_tolerance(context, head_dim),
        rows=batch * tokens,
    )


def _slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes, for a power of two of heads."""
    return np.float32(2.0) ** (-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)


def _attention_name(
    batch: int,
    tokens: int,
    context: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    int8: bool,
    options: Mapping[str, Any],
) -> str:
    described = [f", {name} {value}" if name != "alibi" else ", ALiBi" for name, value in options.items()]
    sizes = f"{batch} x {tokens}, context {context}, {q_heads}/{kv_heads} heads of {head_dim}"
    return "".join([sizes, ", int8" * int8, *described])


def encoding(batch: int, tokens: int, *, heads: int, head_dim: int, merged: bool = False) -> Case:
    """Make a case of encoder attention: full attention in rows of different lengths; merged: with sizes."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        q, k, v = (_normal(subkey, (batch, tokens, heads, head_dim)) for subkey in jax.random.split(key, 3))
        lengths = jnp.linspace(tokens, 1, batch).astype(jnp.int32)
        index = jnp.arange(tokens, dtype=jnp.int32)
        real = index < lengths[:, None]
        sizes = jnp.where(real, 1.0 + index % 5, 0.0)
        return q, k, v, jnp.where(real, index, -1), sizes if merged else lengths

    def call(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, seen: jax.Array) -> jax.Array:
        lengths, key_sizes = (None, seen) if merged else (seen, None)
        heads = attention(q, k, v, positions, lengths, key_sizes=key_sizes, scale=head_dim**-0.5, causal=False)
        return jnp.where((positions >= 0)[..., None, None], heads, 0)  # results for padding are arbitrary

    return Case(
        op="attention",
        name=f"{batch} x {tokens}, {heads} heads of {head_dim}" + ", sizes" * merged,
        make=make,
        call=call,
        reference=functools.partial(references.attention, scale=head_dim**-0.5),
        # cuDNN takes the logarithms of sizes, up to log(5), in bfloat16: exp magnifies their roundings as much.
        tolerance=_attention_tolerance(tokens, head_dim, roundings=7 if merged else 4),
        rows=batch * tokens,
    )


def quantizing(rows: int, inputs: int) -> Iterator[Case]:
    """Yield the quantisation of rows to int8, without and with a norm."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, scale = jax.random.split(key)
        return _normal(x, (rows, inputs)), _normal(scale, (inputs,), jnp.float32)

    def dequantized(quantized: tuple[jax.Array, jax.Array]) -> jax.Array:
        return quantized[0].astype(jnp.float32) * quantized[1]

    # Both round as the kernel does. Where an error of float32 decides, an element may be a step off, which is of the
    # size of two roundings to bfloat16.
    case = functools.partial(Case, name=f"{rows} x {inputs}", rows=rows, tolerance=tolerance("bfloat16", roundings=2))
    yield case(
        op="quantize_rows",
        make=lambda key: make(key)[:1],
        call=lambda x: dequantized(quantize_rows(x)),
        reference=references.rounded_rows,
    )
    yield case(
        op="norm_quantize",
        make=make,
        call=lambda x, scale: dequantized(norm_quantize(x, scale, None, eps=1e-5)),
        reference=lambda x, scale: references.rounded_rows(references.normalized(x, scale, None, eps=1e-5)),
    )


def quantized(rows: int, outputs: int, inputs: int) -> Case:
    """Make a case of the W8A8 matmul."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, w = jax.random.split(key)
        return *formats.quantize_rows(_normal(x, (rows, inputs))), *_weights(w, outputs, inputs, "int8")

    def reference(q: np.ndarray, q_scale: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return (q.astype(np.float64) @ weight.astype(np.float64).T) * q_scale * scale

    return Case(
        op="quantized_matmul",
        name=f"{rows} x {inputs} by {outputs}",
        make=make,
        call=functools.partial(quantized_matmul, dtype=jnp.bfloat16),
        reference=reference,
        operands="int8",
        rows=rows,
        tolerance=tolerance("bfloat16"),
    )


def experts(tokens: int, *, experts: int, k: int, embed: int, hidden: int) -> Iterator[Case]:
    """Yield the operations of an MoE layer."""
    name = f"{tokens} tokens, {k} of {experts} experts"
    case = functools.partial(Case, name=name, rows=tokens)
    for capacity in (None, -(-tokens * k // (2 * experts))):  # the second drops some choices
        yield case(
            op="top_k_gating",
            name=name if capacity is None else f"{name}, capacity {capacity}",
            make=lambda key: (_normal(key, (tokens, experts), jnp.float32),),
            call=functools.partial(moe.top_k_gating, k=k, capacity=capacity),
            reference=functools.partial(references.top_k_gating, k=k, capacity=capacity),
            tolerance=tolerance("float32", roundings=64, products=experts),  # exp of up to 8 magnifies errors 8 times
        )

    def rows_of(count: int, width: int) -> Callable[[jax.Array], tuple[Any, ...]]:
        def make(key: jax.Array) -> tuple[Any, ...]:
            x, logits = jax.random.split(key)
            return _normal(x, (count, width)), _routing(logits, tokens, experts, k)

        return make

    yield case(
        op="permute",
        make=rows_of(tokens, embed),
        call=moe.permute,
        reference=references.permute,
        tolerance=tolerance("float64"),  # copies
    )
    yield case(
        op="unpermute",
        make=rows_of(tokens * k, embed),
        call=moe.unpermute,
        reference=references.unpermute,
        tolerance=tolerance("bfloat16", products=k),
    )

    def matrices(key: jax.Array) -> tuple[Any, ...]:
        x, routing = rows_of(tokens * k, embed)(key)
        weights = _normal(jax.random.fold_in(key, 1), (experts, hidden, embed), scale=embed**-0.5)
        return x, weights, routing.offsets, routing.sizes

    yield case(
        op="grouped_matmul",
        make=matrices,
        call=moe.grouped_matmul,
        reference=references.grouped_matmul,
        tolerance=tolerance("bfloat16", products=embed),
    )


def merging(batch: int, tokens: int, embed: int, *, r: int, padding: bool = False) -> Case:
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
        name=f"{batch} x {tokens} x {embed}, {r} merged" + ", padding" * padding,
        make=make,
        call=functools.partial(merge_tokens, r=r),
        reference=functools.partial(references.merge_tokens, r=r),
        tolerance=tolerance("bfloat16", products=tokens),
        rows=batch * tokens,
    )
