"""Compares a library of CPU kernels with XLA, and measures up to how many rows it is faster, in a process of its own.

`python -m jaxinfer.compiled.cpu_checks` loads a library that is in the cache folder, and compares or measures. It may
crash, as instructions that a processor lists and lacks would make it, or hang, without harm to the process that asks.
Operations are called as models call them, so that nothing here depends on how the kernels take their arguments.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compiled.options import COMMON, LARGE_WEIGHTS, compiler_options
from jaxinfer.disk_cache import KeptFiles
from jaxinfer.pallas_kernels import (
    KVPages,
    RecurrentState,
    Weights,
    cached_attention,
    gated_delta_rule,
    linear_residual,
    norm_linear,
    small_batch_linear,
)
from jaxinfer.pallas_kernels.choices import CLEARLY_FASTER
from jaxinfer.pallas_kernels.cpu.library import DEFAULT_ROWS, Library, load_library, use_library
from jaxinfer.pallas_kernels.dispatch import recorded_implementations
from jaxinfer.pallas_kernels.moe import expert_mlp, top_k_gating
from jaxinfer.pallas_kernels.weights import GROUP, NIBBLES

FORMATS = ("float32", "bfloat16", "int8", "uint16")
"""Dtypes of stored matrices whose limits are measured; uint16 is int4."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows of x at which the library and XLA are compared."""

MATRIX_BYTES = 32 << 20
"""Bytes of a matrix that is measured with. There are two, in turn, which together leave the caches of most CPUs."""

MEASURE_SECONDS = 20.0
"""Seconds of measuring after which the formats that are left keep the default."""

ROUNDS = 7
TURN_SECONDS = 0.01
DOUBTLESS = (4.0, 4.0, 1.5)
"""How many times as fast as the other, in all rounds, a product is that is measured no further after 1, 2, 3 rounds."""

TURNS_SECONDS = 0.2
"""Seconds of turns after which three rounds are enough."""

_QUICKLY: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of a program that runs once, and would be compiled for longer than it runs."""

_TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "int8": 1e-2, "uint16": 2e-3}
"""Largest errors, relative to the largest value, by the dtype of a matrix or cache. int8 rounds both sides; int4 leaves
rows of x in 16 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A call of an operation, whose result is compared.

    Attributes:
      name: what is said of it. call: the operation with its options. args: arrays.
      tolerance: largest error relative to the largest value of a result.
      compared: chooses what is compared of the results.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float
    compared: Callable[[Any], Any] = lambda results: results


def cases() -> Iterator[Case]:
    """Yield calls of every operation that has kernels: awkward shapes, all formats, extreme values."""
    rng = np.random.default_rng(0)
    for dtype in FORMATS:
        yield from _linear_cases(rng, dtype, rows=5)
        yield _product_case(rng, dtype, rows=1)
        yield _product_case(rng, dtype, rows=19)
        yield _expert_case(rng, dtype)
    yield _extreme_case()
    for dtype, tokens in (("float32", 1), ("bfloat16", 1), ("int8", 1), ("float32", 3), ("int8", 3), ("float32", 40)):
        yield _attention_case(rng, dtype, tokens)
    yield _attention_case(rng, "bfloat16", 1, rows_dtype="float32")
    for dtype, tokens in (("float32", 1), ("bfloat16", 1), ("float32", 70)):
        yield _delta_rule_case(rng, dtype, tokens)


def compare(library: Library) -> tuple[list[str], list[str]]:
    """Compare a library's results with XLA's. Returns the operations that it computes, and the differences, as text."""
    operations, compared = set(), []
    for case in cases():
        if computed := _operations(case, library):
            operations |= computed
            compared.append(case)
    actual, expected = (_results(compared, used) for used in (library, None))
    differences = []
    for case, ours, theirs in zip(compared, actual, expected, strict=True):
        error = max(map(_error, jax.tree.leaves(case.compared(ours)), jax.tree.leaves(case.compared(theirs))))
        if not error <= case.tolerance:
            differences.append(f"{case.name} by {error:.1e} of the largest value, more than {case.tolerance:.0e}")
    return sorted(operations), differences


def _operations(case: Case, library: Library) -> set[str]:
    """The operations that a case runs by the library's kernels."""
    with use_library(library), recorded_implementations() as used:
        jax.eval_shape(case.call, *case.args)
    return {operation for operation, by in used.items() if any(implementation.name == "ffi" for implementation in by)}


def _results(compared: list[Case], library: Library | None) -> list[Any]:
    """The results of all cases, as one program, in which independent calls run at once."""
    calls = [case.call for case in compared]

    def run(arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [call(*args) for call, args in zip(calls, arguments, strict=True)]

    with use_library(library):
        lowered = jax.jit(run).lower([case.args for case in compared])
    return jax.device_get(lowered.compile(_QUICKLY)([case.args for case in compared]))


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error relative to the largest value; infinity where only one is finite."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not (np.isfinite(actual) == np.isfinite(expected)).all():
        return np.inf
    difference = np.abs(np.nan_to_num(actual) - np.nan_to_num(expected)).max(initial=0.0)
    return float(difference / max(np.abs(np.nan_to_num(expected)).max(initial=0.0), 1e-30))


def _matrix(rng: np.random.Generator, dtype: str, *shape: int) -> Weights:
    """Return random weights [..., N, K] stored in a dtype."""
    *leading, outputs, inputs = shape
    match dtype:
        case "int8":
            scale = rng.uniform(0.5, 1.5, (*leading, outputs)) / (64 * inputs**0.5)
            return Weights(_array(rng.integers(-127, 128, shape), np.int8), _array(scale, np.float32))
        case "uint16":
            words = rng.integers(0, 1 << 16, (*leading, outputs, inputs // NIBBLES))
            scale = rng.uniform(-1, 1, (*leading, inputs // GROUP, outputs)) / (4 * inputs**0.5)
            return Weights(_array(words, np.uint16), _array(scale, jnp.bfloat16))
    return Weights(_array(rng.normal(size=shape) / inputs**0.5, dtype))


def _array(values: np.ndarray, dtype: Any) -> jax.Array:
    return jnp.asarray(values.astype(np.dtype(dtype)))


def _rows_dtype(dtype: str) -> str:
    """The dtype of x for weights stored in a dtype."""
    return "bfloat16" if dtype == "bfloat16" else "float32"


def _linear_cases(rng: np.random.Generator, dtype: str, rows: int) -> Iterator[Case]:
    inputs, outputs, rows_dtype = 3 * GROUP, 102, _rows_dtype(dtype)
    x = _array(rng.normal(size=(rows, inputs)), rows_dtype)
    scale, shift, bias = (_array(rng.normal(size=size), np.float32) for size in (inputs, inputs, outputs))
    residual, weights = _array(rng.normal(size=(rows, outputs)), rows_dtype), _matrix(rng, dtype, outputs, inputs)
    gated = functools.partial(norm_linear, eps=1e-5, activation="silu", gated=True)
    normed = functools.partial(norm_linear, eps=1e-5, activation="gelu")
    for name, call, args in (
        ("norm_linear, gated", gated, (x, scale, None, weights, None)),
        ("norm_linear", normed, (x, scale, shift, weights, bias)),
        ("linear_residual", linear_residual, (x, weights, residual, None)),
    ):
        yield Case(name=f"{name}, {rows} rows, {dtype}", call=call, args=args, tolerance=_TOLERANCES[dtype])


def _product_case(rng: np.random.Generator, dtype: str, rows: int) -> Case:
    inputs, outputs = 2 * GROUP, 35
    x, weights = _array(rng.normal(size=(rows, inputs)), _rows_dtype(dtype)), _matrix(rng, dtype, outputs, inputs)
    args = x, weights, _array(rng.normal(size=outputs), np.float32)
    name = f"small_batch_linear, {rows} rows, {dtype}"
    return Case(name=name, call=small_batch_linear, args=args, tolerance=_TOLERANCES[dtype])


def _extreme_case() -> Case:
    """A product of int8 values that are all 127 or -127, whose sums are the largest."""
    inputs, outputs = 1024, 34
    sign = np.where(np.arange(outputs)[:, None] % 2, 1, -1) * np.ones((outputs, inputs))
    weights = Weights(_array(127 * sign, np.int8), _array(np.ones(outputs), np.float32))
    x = _array(np.stack([np.ones(inputs), -np.ones(inputs), np.where(np.arange(inputs) % 2, 1, -1)]), np.float32)
    return Case(name="int8 at +-127", call=small_batch_linear, args=(x, weights), tolerance=1e-5)


def _expert_case(rng: np.random.Generator, dtype: str) -> Case:
    tokens, experts, embed, hidden, rows_dtype = 3, 5, 2 * GROUP, GROUP, _rows_dtype(dtype)
    x = _array(rng.normal(size=(tokens, embed)), rows_dtype)
    gate_up, down = _matrix(rng, dtype, experts, 2 * hidden, embed), _matrix(rng, dtype, experts, embed, hidden)
    biases = [_array(rng.normal(size=(experts, size)), np.float32) for size in (2 * hidden, embed)]

    def call(x: jax.Array, logits: jax.Array, *args: Any) -> jax.Array:
        return expert_mlp(x, top_k_gating(logits, 2), *args, activation="silu", gated=True)

    args = (x, _array(rng.normal(size=(tokens, experts)), np.float32), gate_up, down, *biases)
    return Case(name=f"expert_mlp, {dtype}", call=call, args=args, tolerance=2 * _TOLERANCES[dtype])


def _attention_case(rng: np.random.Generator, dtype: str, tokens: int, rows_dtype: str | None = None) -> Case:
    """Return rows with contexts of several pages of a dtype, one of them padding; more options with more tokens."""
    rows, kv_heads, group, head_dim, width, size = 4, 2, 3, 16, 9, 16
    rows_dtype = rows_dtype or _rows_dtype(dtype)
    shape = rows * width + 2, size, kv_heads, head_dim
    if dtype == "int8":
        k, v = (_array(rng.integers(-127, 128, shape), np.int8) for _ in range(2))
        scales = [_array(rng.uniform(0.01, 0.03, (shape[0], kv_heads)), np.float32) for _ in range(2)]
        pages = KVPages(k, v, *scales)
    else:
        pages = KVPages(*(_array(rng.normal(size=shape), dtype) for _ in range(2)))
    page_table = _array(rng.permutation(rows * width).reshape(rows, width), np.int32)
    last = np.array([tokens + 37, tokens - 1, width * size - 1, tokens - 1])
    positions = last[:, None] - np.arange(tokens)[::-1]
    positions[-1] = -1
    angles = rng.uniform(0, 6, (rows, tokens, 1, head_dim // 4))
    rotary = tuple(_array(f(angles), np.float32) for f in (np.cos, np.sin))
    norms = tuple(_array(rng.uniform(0.5, 1.5, head_dim), np.float32) for _ in range(2))
    alibi = _array(rng.uniform(0, 0.5, kv_heads * group), np.float32) if tokens == 3 else None
    options = {"window": 21, "softcap": 4.0} if tokens == 3 else {}
    qkv = _array(rng.normal(size=(rows, tokens, kv_heads * (group + 2) * head_dim)), rows_dtype)

    def call(qkv: jax.Array, pages: KVPages, page_table: jax.Array, positions: jax.Array, *rest: Any) -> Any:
        rotary, norms, alibi = rest
        more = {"rotary": rotary, "norms": norms, "alibi": alibi, **options}
        return cached_attention(qkv, pages, page_table, positions, norm_eps=1e-5, scale=head_dim**-0.5, **more)

    def compared(results: Any) -> Any:
        attended, stored = results
        scales = (1.0, 1.0) if stored.k_scale is None else (x[:, None, :, None] for x in stored[2:])
        return attended[:-1], [x.astype(np.float32) * scale for x, scale in zip(stored[:2], scales, strict=True)]

    args = (qkv, pages, page_table, _array(positions, np.int32), rotary, norms, alibi)
    name = f"cached_attention, {tokens} tokens, {dtype}"
    return Case(name=name, call=call, args=args, tolerance=_TOLERANCES[dtype], compared=compared)


def _delta_rule_case(rng: np.random.Generator, dtype: str, tokens: int) -> Case:
    """Return rows of a delta rule that begin, go on, end in padding and are padding; a state has 70 columns."""
    rows, key_heads, value_heads, key_dim, value_dim, conv = 4, 2, 6, 20, 70, 4
    features = 2 * key_dim + value_heads // key_heads * value_dim
    shapes = RecurrentState.shapes(
        rows + 1,
        conv=conv,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=np.dtype(dtype),
    )
    cache = jax.tree.map(lambda x: _array(rng.normal(size=x.shape), x.dtype), shapes)
    positions = np.array([0, 9, 5, 0])[:, None] + np.arange(tokens)
    positions[2, tokens - tokens // 3 :] = positions[3] = -1
    args = (
        _array(rng.normal(size=(rows, tokens, key_heads, features)), dtype),
        _array(-rng.gamma(0.5, size=(rows, tokens, value_heads)), np.float32),
        _array(rng.uniform(size=(rows, tokens, value_heads)), np.float32),
        _array(rng.normal(size=(key_heads, features, conv)), np.float32),
        cache,
        _array(np.array([3, 0, 4, 1]), np.int32),
        _array(positions, np.int32),
    )

    def compared(results: Any) -> Any:
        output, states = results
        real = np.asarray(positions >= 0)[..., None, None]
        return np.where(real, output, 0), jax.tree.map(lambda x: x.astype(np.float32), states)

    name = f"gated_delta_rule, {tokens} tokens, {dtype}"
    call = functools.partial(gated_delta_rule, key_dim=key_dim)
    return Case(name=name, call=call, args=args, tolerance=_TOLERANCES["float32"], compared=compared)


def limits(library: Library, *, seconds: float = MEASURE_SECONDS) -> dict[str, int]:
    """Measure up to how many rows each format's products are the library's; 0 for formats without kernels.

    Up to `DEFAULT_ROWS` XLA, and beyond the library, must be clearly faster. In formats for which there was no time the
    limit is `DEFAULT_ROWS`.
    """
    end = time.monotonic() + seconds
    return {dtype: _limit(library, dtype, end) for dtype in FORMATS}


def _limit(library: Library, dtype: str, end: float) -> int:
    """The most rows at which the library is faster, from the default on: with more rows it gains less."""
    at = ROWS.index(DEFAULT_ROWS)
    if _gain(library, dtype, DEFAULT_ROWS, end) < 0:
        return next((rows for rows in reversed(ROWS[:at]) if _gain(library, dtype, rows, end) >= 0), 0)
    slower = next((i for i in range(at + 1, len(ROWS)) if _gain(library, dtype, ROWS[i], end) < 0), len(ROWS))
    return ROWS[slower - 1]


def _gain(library: Library, dtype: str, rows: int, end: float) -> float:
    """Compute the logarithm of how much faster the library is, less what it must be; negative if XLA is to run."""
    times = ([1.0], [1.0]) if time.monotonic() > end else _times(library, dtype, rows)
    if times is None:
        return -math.inf
    ratios = [math.log(statistic(times[1]) / statistic(times[0])) for statistic in (statistics.median, min)]
    margin = -math.log(CLEARLY_FASTER)
    return max(ratios) + margin if rows <= DEFAULT_ROWS else min(ratios) - margin


def _times(library: Library, dtype: str, rows: int) -> tuple[list[float], list[float]] | None:
    """Return seconds of a product by the library and by XLA, in turn; None if the library does not multiply so."""
    matrices = _large_matrices(dtype)
    x = jnp.ones((rows, matrices[0].shape[1]), _rows_dtype(dtype))
    without = compiler_options("cpu", rows=rows, dtype=np.dtype(dtype), weight_bytes=LARGE_WEIGHTS)
    programs = []
    for used, options in ((library, {}), (None, without)):
        with use_library(used), recorded_implementations() as implementations:
            lowered = jax.jit(small_batch_linear).lower(x, matrices[0])
        if used is not None and next(iter(implementations["small_batch_linear"])).name != "ffi":
            return None
        programs.append(lowered.compile(compiler_options=COMMON | options))
    for program in programs:
        jax.block_until_ready(program(x, matrices[0]))
    ours, theirs, in_turn = [], [], itertools.cycle(matrices)
    begin = time.monotonic()
    for rounds in range(1, ROUNDS + 1):
        for program, times in zip(programs, (ours, theirs), strict=True):
            times.append(_time(program, x, in_turn))
        clearly = DOUBTLESS[min(rounds, len(DOUBTLESS)) - 1]
        if min(ours) > clearly * max(theirs) or min(theirs) > clearly * max(ours):
            break
        if rounds >= 3 and time.monotonic() - begin > TURNS_SECONDS:
            break
    return ours, theirs


def _time(program: Callable[..., Any], x: jax.Array, in_turn: Iterator[Weights]) -> float:
    """Measure the seconds of a product, from as many as take `TURN_SECONDS`."""
    calls, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < TURN_SECONDS:
        jax.block_until_ready(program(x, next(in_turn)))
        calls += 1
    return taken / calls


@functools.lru_cache(maxsize=1)
def _large_matrices(dtype: str) -> tuple[Weights, Weights]:
    inputs = 4096
    row_bytes = inputs // NIBBLES * 2 if dtype == "uint16" else inputs * np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    small = _matrix(rng, dtype, 64, inputs)
    copies = (MATRIX_BYTES // 2 if dtype == "uint16" else MATRIX_BYTES) // row_bytes // 64  # XLA unpacks it slowly

    def tiled(x: jax.Array | None, axis: int) -> Any:
        return None if x is None else jnp.concatenate([x] * copies, axis=axis)

    first, second = (Weights(tiled(small.weight, 0), tiled(small.scale, -1)) for _ in range(2))
    return first, second


def main() -> None:
    """Compare or measure the library that the argument, JSON, describes, and print what was seen, as JSON."""
    request = json.loads(sys.argv[1])
    library = Library(digest=request["digest"], level=request["level"], functions=tuple(request["functions"]))
    content = KeptFiles(Path(request["folder"]), max_bytes=0).get(library.digest)
    if content is None:
        raise FileNotFoundError(f"{library.digest} is not in {request['folder']}")
    load_library(library, content)
    seen: dict[str, Any]
    if request["what"] == "compare":
        operations, differences = compare(library)
        seen = {"operations": operations, "differences": differences}
    else:
        seen = limits(dataclasses.replace(library, limits=tuple((dtype, max(ROWS)) for dtype in FORMATS)))
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
