"""The operations of programs on a CPU, compiled with YNNPACK's fusions and without, against references.

    python -m tests.compiled.cpu_operations demo|others|controls

A process of its own, since XLA's flags are a process's. It prints a JSON object: case -> `Outcome`. References run
operation by operation, outside of any program, so that XLA has nothing to fuse.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import pallas_kernels as kernels
from jaxinfer.compiled.options import COMMON
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.sampling.arrays import RowOptions, sampling_arrays
from jaxinfer.generation.sampling.sampler import truncate
from jaxinfer.pallas_kernels import KVPages, Weights, moe
from jaxinfer.pallas_kernels.attention import reference as attention
from jaxinfer.pallas_kernels.convolution import reference as convolution
from jaxinfer.pallas_kernels.convolution.api import convolution as convolve
from jaxinfer.pallas_kernels.linear import reference as linear
from jaxinfer.pallas_kernels.moe import reference as experts
from jaxinfer.pallas_kernels.moe.routing import Rule
from jaxinfer.pallas_kernels.quantization import reference as quantization
from jaxinfer.pallas_kernels.sampling import reference as sampling
from jaxinfer.pallas_kernels.sampling.api import max_and_argmax
from jaxinfer.pallas_kernels.token_merging import reference as token_merging
from jaxinfer.pallas_kernels.weights import quantize
from jaxinfer.pallas_kernels.weights import quantize_rows as quantize_rows_reference
from tests.compiled.fusions import garbled_products, reduced_products, ynn_fusions


def cached_attention_reference(*args, rotary, scale):
    """Attend without norms of the heads and without ALiBi."""
    options = {"norm_eps": 0.0, "scale": scale, "window": None, "softcap": None}
    return attention.cached_attention(*args, rotary, None, None, **options)


def gating_reference(logits, *, k):
    return experts.top_k_gating(logits, rule=Rule(k=k))


merge_tokens_reference = functools.partial(token_merging.merge_tokens, protected=1, protect_isolated=None)

OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (kernels.attention, attention.attention),
    "cached_attention": (kernels.cached_attention, cached_attention_reference),
    "convolution": (convolve, convolution.convolution),
    "gating": (moe.top_k_gating, gating_reference),
    "grouped_matmul": (moe.grouped_matmul, experts.grouped_matmul),
    "linear": (kernels.small_batch_linear, linear.linear),
    "linear_residual": (kernels.linear_residual, linear.linear_residual),
    "max_and_argmax": (max_and_argmax, sampling.max_and_argmax),
    "merge_tokens": (kernels.merge_tokens, merge_tokens_reference),
    "norm_linear": (kernels.norm_linear, linear.norm_linear),
    "norm_quantize": (kernels.norm_quantize, quantization.norm_quantize),
    "paged_attention": (kernels.paged_attention, attention.paged_attention),
    "permute": (moe.permute, experts.permute),
    "quantize": (quantize, quantize),
    "quantize_rows": (kernels.quantize_rows, quantize_rows_reference),
    "quantized_matmul": (kernels.quantized_matmul, quantization.quantized_matmul),
    "truncate": (truncate, truncate),
    "unpermute": (moe.unpermute, experts.unpermute),
}
"""Name -> an operation, and the reference that it is compared with."""

WITHOUT_FUSIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
FLOAT32, BFLOAT16, QUANTISED, EXACT = 1e-5, 2e-2, 2e-2, 0.0
"""The largest error, as a part of the largest number of a result. A step of a quantised row is 1 / 127 of it."""

TOLERANCES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": QUANTISED, "fp8": FLOAT32, "int4": FLOAT32}
"""By how weights, or keys and values, are stored; fp8 and int4 weights are multiplied in float32."""

FLOATS = dict.fromkeys(TOLERANCES, jnp.float32) | {"bfloat16": jnp.bfloat16}
"""How they are stored -> the dtype of activations."""

PAGE_SIZE = 16


class Case(NamedTuple):
    """An operation of OPERATIONS with its arguments."""

    operation: str
    tolerance: float
    args: tuple[Any, ...]
    options: dict[str, Any]


class Outcome(NamedTuple):
    """Errors and fusions of a case.

    Attributes:
      tolerance: of the errors.
      error, error_without_fusions: the largest error, as a part of the largest number.
      fusions, fusions_without: how many fusions of YNNPACK the two programs have.
      reduced_products: how many products the first program reduces in their fusion.
      garbled_products: those of them that may be garbage.
    """

    tolerance: float
    error: float
    error_without_fusions: float
    fusions: int
    fusions_without: int
    reduced_products: int
    garbled_products: list[str]


def demo_cases() -> Iterator[tuple[str, Case]]:
    """Yield operations of the demo model's programs at their sizes, and attention, whose products XLA reduces."""
    for rows in (1, 32):  # a decode step, and a chunk of a prompt
        yield from linear_cases("float32", rows, inputs=256, outputs=512)
    yield cached_attention_case("float32", 1, 1, heads=2, head_dim=64, pages=64)
    yield "max_and_argmax 4096", Case("max_and_argmax", EXACT, (normal(3, 4096),), {})
    yield truncate_case(4096)
    yield next(attention_cases(1, 64, heads=2, head_dim=16))


def other_cases() -> Iterator[tuple[str, Case]]:
    """Yield other formats and sizes, encoders' operations, and mixtures of experts."""
    for stored in ("float32", "bfloat16", "int8", "fp8", "int4"):
        for rows, inputs, outputs in ((1, 256, 512), (32, 256, 512), (8, 256, 704), (1, 256, 4096), (7, 128, 97)):
            if stored != "int4" or inputs % 128 == 0:
                yield from linear_cases(stored, rows, inputs, outputs)
    for rows, inputs in ((32, 256), (7, 128)):
        yield from quantization_cases(rows, inputs)
    for batch, tokens, heads, head_dim in ((1, 64, 2, 16), (2, 65, 4, 64), (3, 33, 1, 8)):
        yield from attention_cases(batch, tokens, heads, head_dim)
    for stored in ("bfloat16", "float32", "int8"):
        for batch, tokens, heads, head_dim, pages in ((1, 1, 2, 64, 64), (1, 32, 2, 64, 64), (3, 4, 1, 32, 5)):
            yield paged_attention_case(stored, batch, tokens, heads, head_dim, pages)
            yield cached_attention_case(stored, batch, tokens, heads, head_dim, pages)
    for batch, tokens, features, r in ((2, 64, 32, 4), (1, 65, 192, 8), (3, 21, 16, 5)):
        yield merge_tokens_case(batch, tokens, features, r)
    for tokens, count, k, inputs, outputs in ((32, 8, 2, 64, 96), (5, 4, 3, 33, 17)):
        yield from moe_cases(tokens, count, k, inputs, outputs)
    for size, inputs, outputs, stride in ((32, 3, 16, 1), (15, 8, 8, 2)):
        yield convolution_case(size, inputs, outputs, stride)
    yield truncate_case(333)


def linear_cases(stored: str, rows: int, inputs: int, outputs: int) -> Iterator[tuple[str, Case]]:
    """Yield a linear layer in a format of weights, alone and with what may be before and after it."""
    dtype, tolerance = FLOATS[stored], TOLERANCES[stored]
    x, matrix, bias = normal(rows, inputs, dtype=dtype), normal(outputs, inputs) / 16, normal(outputs)
    weights = Weights(matrix.astype(dtype)) if stored in ("float32", "bfloat16") else quantize(matrix, stored)
    name = f"{stored} {rows} x {inputs} x {outputs}"
    yield f"linear {name}", Case("linear", tolerance, (x, weights, bias), {})
    if rows == 1:
        return
    residual = normal(rows, outputs, dtype=dtype)
    yield f"linear_residual {name}", Case("linear_residual", tolerance, (x, weights, residual, bias), {})
    args, options = (x, normal(inputs), None, weights, bias), {"eps": 1e-5, "activation": "silu"}
    yield f"norm_linear {name}", Case("norm_linear", tolerance, args, options | {"gated": outputs % 2 == 0})
    if stored == "int8":
        args = (*quantize_rows_reference(x), *weights, bias)
        yield f"quantized_matmul {name}", Case("quantized_matmul", FLOAT32, args, {"dtype": jnp.float32})


def quantization_cases(rows: int, inputs: int) -> Iterator[tuple[str, Case]]:
    """Yield quantising rows, with a norm before it, and quantising weights."""
    x, scale, shift, name = normal(rows, inputs), normal(inputs), normal(inputs), f"{rows} x {inputs}"
    yield f"quantize_rows {name}", Case("quantize_rows", QUANTISED, (x,), {})
    yield f"norm_quantize {name}", Case("norm_quantize", QUANTISED, (x, scale, shift), {"eps": 1e-5})
    for stored in ("int8", "fp8", "int4"):
        yield f"quantize {stored} {name}", Case("quantize", QUANTISED, (x,), {"fmt": stored})


def attention_cases(batch: int, tokens: int, heads: int, head_dim: int) -> Iterator[tuple[str, Case]]:
    """Yield attention over contiguous keys: as encoders have it, over merged tokens, and causal."""
    q, k, v = (normal(batch, tokens, heads, head_dim) for _ in range(3))
    positions = jnp.tile(jnp.arange(tokens), (batch, 1))
    sizes = jnp.asarray(RNG.integers(0, 4, (batch, tokens)), jnp.float32).at[:, 0].set(1)
    name, options = f"{batch} x {tokens} x {heads} x {head_dim}", {"scale": head_dim**-0.5}
    for kind, args, causal in (
        ("plain", (None,), False),
        ("merged", (None, None, sizes), False),
        ("causal", (jnp.full(batch, tokens),), True),
    ):
        case = Case("attention", FLOAT32, (q, k, v, positions, *args), options | {"causal": causal})
        yield f"attention {kind} {name}", case


def paged_attention_case(
    stored: str, batch: int, tokens: int, heads: int, head_dim: int, pages: int
) -> tuple[str, Case]:
    """Return attention over a cache in a dtype, from the middle of a row on."""
    q = normal(batch, tokens, 2 * heads, head_dim, dtype=FLOATS[stored])
    args = q, *cache_of(stored, batch, tokens, heads, head_dim, pages)
    name = f"paged_attention {stored} {batch} x {tokens} x {heads} x {head_dim}"
    return name, Case("paged_attention", TOLERANCES[stored], args, {"scale": head_dim**-0.5})


def cached_attention_case(
    stored: str, batch: int, tokens: int, heads: int, head_dim: int, pages: int
) -> tuple[str, Case]:
    """Return attention over a cache from the QKV projection's result on."""
    qkv = normal(batch, tokens, heads * (2 + 2) * head_dim, dtype=FLOATS[stored])
    args = qkv, *cache_of(stored, batch, tokens, heads, head_dim, pages)
    angles = normal(batch, tokens, 1, head_dim // 2)
    options = {"scale": head_dim**-0.5, "rotary": (jnp.cos(angles), jnp.sin(angles))}
    name = f"cached_attention {stored} {batch} x {tokens} x {heads} x {head_dim}"
    return name, Case("cached_attention", TOLERANCES[stored], args, options)


def cache_of(
    stored: str, batch: int, tokens: int, heads: int, head_dim: int, pages: int
) -> tuple[KVPages, jax.Array, jax.Array]:
    """Return a cache full of random keys and values, a page table, and the positions of the tokens to come."""
    shape = batch * pages, PAGE_SIZE, heads, head_dim
    if stored == "int8":
        k, v = (jnp.asarray(RNG.integers(-127, 128, shape), jnp.int8) for _ in range(2))
        k_scale, v_scale = (jnp.asarray(RNG.uniform(0.01, 0.03, (len(k), heads)), jnp.float32) for _ in range(2))
        cache = KVPages(k, v, k_scale, v_scale)
    else:
        cache = KVPages(normal(*shape, dtype=stored), normal(*shape, dtype=stored))
    table = RNG.permutation(batch * pages).reshape(batch, pages)
    positions = np.arange(batch)[:, None] + np.arange(tokens) + PAGE_SIZE * pages // 2
    return cache, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


def merge_tokens_case(batch: int, tokens: int, features: int, r: int) -> tuple[str, Case]:
    """Return the merging of `r` tokens of each row."""
    args = normal(batch, tokens, features), jnp.ones((batch, tokens)), normal(batch, tokens, 16)
    return f"merge_tokens {batch} x {tokens} x {features}", Case("merge_tokens", FLOAT32, args, {"r": r})


def moe_cases(tokens: int, count: int, k: int, inputs: int, outputs: int) -> Iterator[tuple[str, Case]]:
    """Yield the parts of a mixture of so many experts."""
    x, logits, name = normal(tokens, inputs), normal(tokens, count), f"{tokens} x {count} x {k}"
    routing = gating_reference(logits, k=k)
    rows, matrices = experts.permute(x, routing), normal(count, outputs, inputs)
    yield f"gating {name}", Case("gating", FLOAT32, (logits,), {"k": k})
    yield f"permute {name}", Case("permute", EXACT, (x, routing), {})
    args = (rows, Weights(matrices), routing.offsets, routing.sizes)
    yield f"grouped_matmul {name}", Case("grouped_matmul", FLOAT32, args, {})
    yield f"unpermute {name}", Case("unpermute", FLOAT32, (rows, routing), {})


def convolution_case(size: int, inputs: int, outputs: int, stride: int) -> tuple[str, Case]:
    """Return the convolution of two images with kernels of 3 x 3."""
    args = normal(2, size, size, inputs), normal(3, 3, inputs, outputs)
    name = f"convolution {size} x {inputs} x {outputs} by {stride}"
    return name, Case("convolution", FLOAT32, args, {"stride": stride, "padding": 1})


def truncate_case(vocab: int) -> tuple[str, Case]:
    """Return the cut-offs of sampling: which tokens are left."""
    params = (
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=100, top_p=0.8, min_p=0.01),
    )
    options = sampling_arrays([RowOptions(p, seed=0, prompt_length=0, limit=9, stop_token_ids=()) for p in params])
    return f"truncate {vocab}", Case("truncate", EXACT, (3 * normal(len(params), vocab), jax.device_put(options)), {})


RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Return normally distributed numbers."""
    return jnp.asarray(RNG.normal(size=shape), dtype)


def controls() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Return products that are reduced, and functions that give their results in float64.

    Those of a broadcast scalar on the right may be garbage.
    """
    x, row = normal(128, 256), normal(256)
    ones = functools.partial(jnp.ones, dtype=jnp.float32)
    return {
        "scalar on the right": (lambda x: (x @ ones((256, 256))).sum(1), lambda x: 256 * x.sum(1), (x,)),
        "scalar, exponential": (
            lambda x: jnp.exp(x @ ones((256, 256)) / 99).max(0),
            lambda x: np.full(256, np.exp(x.sum(1) / 99).max()),
            (x,),
        ),
        "argument on the right": (
            lambda x, s: (x @ jnp.full((256, 256), s)).sum(0),
            lambda x, s: np.full(256, s * x.sum()),
            (x, jnp.float32(2)),
        ),
        "scalar on the left": (lambda x: (ones((64, 128)) @ x).sum(1), lambda x: np.full(64, x.sum()), (x,)),
        "row on the right": (
            lambda x, row: (x @ jnp.broadcast_to(row, (256, 256))).sum(1),
            lambda x, row: x.sum(1) * row.sum(),
            (x, row),
        ),
        "not reduced": (lambda x: x @ ones((256, 256)), lambda x: np.tile(x.sum(1)[:, None], 256), (x,)),
    }


def outcome(
    operation: Callable[..., Any], expected: Any, tolerance: float, args: tuple[Any, ...], **options: Any
) -> Outcome:
    """Compile and run an operation with YNNPACK's fusions and without."""
    lowered = jax.jit(functools.partial(operation, **options)).lower(*args)
    fused, unfused = (lowered.compile(COMMON | given) for given in ({}, WITHOUT_FUSIONS))
    fusions = ynn_fusions(fused.as_text())
    return Outcome(
        tolerance=tolerance,
        error=error(fused(*args), expected),
        error_without_fusions=error(unfused(*args), expected),
        fusions=len(fusions),
        fusions_without=len(ynn_fusions(unfused.as_text())),
        reduced_products=sum(len(reduced_products(computation)) for computation in fusions.values()),
        garbled_products=garbled_products(fused.as_text()),
    )


def outcome_of_case(case: Case) -> Outcome:
    """Compare a case with its reference."""
    operation, reference = OPERATIONS[case.operation]
    with jax.disable_jit():
        expected = reference(*case.args, **case.options)
    return outcome(operation, expected, case.tolerance, case.args, **case.options)


def outcome_of_control(name: str) -> Outcome:
    """Compare a control with float64."""
    operation, exact, args = controls()[name]
    expected = exact(*(np.asarray(x).astype(np.float64) for x in args))
    return outcome(operation, expected, 1e-3, args)


def error(results: Any, expected: Any) -> float:
    """Return the largest difference as a part of the largest number; infinite where one alone is not finite."""
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return max(_difference(*(np.asarray(x).astype(np.float64) for x in pair)) for pair in pairs)


def _difference(result: np.ndarray, expected: np.ndarray) -> float:
    finite = np.isfinite(expected)
    if result.shape != expected.shape or not np.array_equal(result[~finite], expected[~finite], equal_nan=True):
        return np.inf
    difference = np.abs(result[finite] - expected[finite]).max() / max(np.abs(expected[finite]).max(), 1e-30)
    return float(difference) if np.isfinite(difference) else np.inf


def main(which: str) -> None:
    """Print the outcomes of the cases "demo" or "others", or of "controls"."""
    if which == "controls":
        outcomes = {name: outcome_of_control(name) for name in controls()}
    else:
        cases = {"demo": demo_cases, "others": other_cases}[which]()
        outcomes = {name: outcome_of_case(case) for name, case in cases}
    print(json.dumps({name: outcome._asdict() for name, outcome in outcomes.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
