"""The small-batch kernel with int8, int4 and fp8 weights: interpreted with race detection, lowered, and compiled.

Errors are bounded against float64 matmuls of the dequantised weights; `test_weights.py` bounds the quantisation errors.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels.linear.api import linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.linear.mosaic.small_batch import MAX_RESIDENT_ROWS, Norm, fused_small_batch_linear
from jaxinfer.pallas_kernels.linear.reference import linear
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from jaxinfer.pallas_kernels.weights import GROUP, Weights, dequantize, quantize, quantize_rows
from tests.kernels.interpreting import without_races

FORMATS = ["int8", "int4", "fp8"]
each_format = pytest.mark.parametrize("fmt", FORMATS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A linear layer. outputs: columns of the result. norm: "rms" or "layer"."""

    rows: int
    inputs: int
    outputs: int
    dtype: Any = jnp.bfloat16
    norm: str | None = None
    gated: bool = False
    bias: bool = False
    residual: bool = False


CASES = [
    Case(rows=1, inputs=3 * GROUP, outputs=64, bias=True),
    Case(rows=1, inputs=2 * GROUP, outputs=64, norm="rms", gated=True),
    Case(rows=3, inputs=5 * GROUP, outputs=128, norm="layer", bias=True),
    Case(rows=9, inputs=4 * GROUP, outputs=64, residual=True),
]
UNEVEN = [  # inputs are not a multiple of 128, outputs not of 64; int4 supports neither
    Case(rows=1, inputs=5 * 64, outputs=72, norm="layer", bias=True),
    Case(rows=3, inputs=3 * 64, outputs=75, bias=True),
    Case(rows=9, inputs=7 * 64, outputs=40, gated=True, bias=True),
]
WIDE = [
    Case(rows=rows, inputs=inputs, outputs=outputs, dtype=dtype, norm=norm, gated=gated, bias=True, residual=not gated)
    for rows, inputs, outputs in [(1, GROUP, 64), (8, 6 * GROUP, 192), (16, 9 * GROUP, 64)]
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    for norm in (None, "rms", "layer")
    for gated in (False, True)
]


def arguments(case: Case, fmt: Any) -> dict[str, Any]:
    """The arguments of `fused_small_batch_linear`."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = case.dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    outputs = case.outputs * (2 if case.gated else 1)
    matrix = normal(outputs, case.inputs, dtype=jnp.float32) / np.sqrt(case.inputs)
    return {
        "x": normal(case.rows, case.inputs),
        "weights": quantize(matrix, fmt),
        "bias": normal(outputs) if case.bias else None,
        "residual": normal(case.rows, case.outputs) if case.residual else None,
        "norm": Norm(1 + normal(case.inputs) / 4, normal(case.inputs) if case.norm == "layer" else None)
        if case.norm
        else None,
        "eps": 1e-5,
        "activation": "silu" if case.gated else None,
        "gated": case.gated,
    }


def exact(x, weights, bias, residual, norm, eps, activation, gated) -> tuple[np.ndarray, Any]:
    """The result in float64, except for the roundings that the formats imply, which are the kernel's: rows to int8, or
    normalised rows to x's dtype.

    Also how far from it a right result may be besides: an input so close to the middle of two steps that an error of
    float32 decides where it is rounded to may be a step off.
    """
    y = np.asarray(x, np.float64)
    if norm is not None:
        if norm.shift is not None:
            y -= y.mean(axis=-1, keepdims=True)
        y = y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + eps) * np.asarray(norm.scale, np.float64)
        if norm.shift is not None:
            y += np.asarray(norm.shift, np.float64)
    matrix = np.asarray(dequantize(weights, jnp.float32), np.float64)
    rounded = _rounded(y, weights, x.dtype)
    float32_error = 1e-6 * (abs(y) + (norm is not None))  # of dividing by the scale, and of the norm
    above, below = (_rounded(y, weights, x.dtype, sign * float32_error) for sign in (1, -1))
    slack = abs(above - below) @ abs(matrix).T
    y = rounded @ matrix.T
    if bias is not None:
        y += np.asarray(bias, np.float64)
    if gated:
        gate, up = y[:, ::2], y[:, 1::2]
        silu = gate / (1 + np.exp(-gate))
        slack = 1.1 * slack[:, ::2] * abs(up) + abs(silu) * slack[:, 1::2]  # silu is nowhere steeper than 1.1
        y = silu * up
    return (y if residual is None else y + np.asarray(residual, np.float64)), slack


def _rounded(y: np.ndarray, weights: Weights, dtype: Any, error: Any = 0.0) -> np.ndarray:
    """Rows with this error as they are multiplied: rounded to int8 for such weights, else to x's dtype."""
    if weights.weight.dtype != jnp.int8:
        return np.asarray(jnp.asarray(y + error, dtype), np.float64)
    scale = np.asarray(quantize_rows(jnp.asarray(y, jnp.float32))[1], np.float64)
    return np.round((y + error) / scale) * scale


def two_splits(tile_k: int) -> Trial:
    """With an odd number of tiles the second split ends past the inputs. More splits may exceed the interpreter's
    threads."""
    return Trial("small_batch_linear", {"tile_k": tile_k, "stages": 2, "split": 2})


def check(case: Case, fmt: Any, tile_k: int = GROUP) -> None:
    args = arguments(case, fmt)
    with two_splits(tile_k).active(), without_races():
        y = fused_small_batch_linear(**args)
    assert y.dtype == case.dtype
    expected, slack = exact(**args)
    # The result is rounded once, by at most half a unit in its last place; besides there are errors of float32 sums.
    allowed = float(jnp.finfo(case.dtype).eps) / 2 * abs(expected) + 1e-5 + 1.01 * slack
    error = abs(np.asarray(y, np.float64) - expected)
    assert (error <= allowed).all(), (error / allowed).max()
    assert np.median(slack) < 2e-3  # so that it hides nothing; a row of few digits can have many such inputs


@pytest.mark.interpreted
@each_format
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, fmt):
    check(case, fmt)


@pytest.mark.interpreted
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_partial_tiles(case, fmt):
    outputs = case.outputs if fmt == "int8" else case.outputs // 8 * 8  # fp8 takes whole tiles of 8 outputs
    check(dataclasses.replace(case, outputs=outputs), fmt, tile_k=64)


@pytest.mark.slow
@each_format
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_kernel_in_more_cases(case, fmt):
    check(case, fmt)


@pytest.mark.interpreted
def test_int8_accumulates_exactly():
    """Rows are rounded in the same way as by the reference, so only the scaling in float32 can differ."""
    args = arguments(Case(rows=2, inputs=4 * GROUP, outputs=64, dtype=jnp.float32), "int8")
    with two_splits(GROUP).active(), without_races():
        y = fused_small_batch_linear(**args)
    np.testing.assert_allclose(y, linear(args["x"], args["weights"]), rtol=1e-6, atol=1e-6)


@settings(max_examples=3)
@given(
    seed=st.integers(0, 1000),
    fmt=st.sampled_from(FORMATS),
    rows=st.integers(1, 20),
    groups=st.integers(1, 2),
    outputs=st.integers(1, 9),
)
def test_operations_through_dispatch(seed, fmt, rows, groups, outputs):
    rng = np.random.default_rng(seed)
    x, residual = rng.normal(size=(rows, groups * GROUP)), rng.normal(size=(rows, outputs))
    scale, bias = rng.normal(size=groups * GROUP), rng.normal(size=outputs)
    x, residual, scale, bias = (jnp.asarray(a, jnp.float32) for a in (x, residual, scale, bias))
    weights = quantize(jnp.asarray(rng.normal(size=(outputs, groups * GROUP)), jnp.float32), fmt)
    plain = {"norm": None, "eps": 1e-5, "activation": None, "gated": False}
    calls = [
        (jax.jit(small_batch_linear)(x, weights, bias), exact(x, weights, bias, None, **plain)),
        (jax.jit(linear_residual)(x, weights, residual, bias), exact(x, weights, bias, residual, **plain)),
        (
            jax.jit(functools.partial(norm_linear, eps=1e-5))(x, scale, None, weights, bias),
            exact(x, weights, bias, None, **{**plain, "norm": Norm(scale, None)}),
        ),
    ]
    for actual, (expected, slack) in calls:
        assert (abs(np.asarray(actual, np.float64) - expected) <= 1e-4 + 1.01 * slack).all()


def shapes(fmt: str, outputs: int, inputs: int) -> Weights:
    """The shapes of weights in this format."""
    matrix = jax.ShapeDtypeStruct((outputs, inputs), jnp.float32)
    return jax.eval_shape(lambda matrix: quantize(matrix, fmt=fmt), matrix)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fmt", "inputs", "outputs", "message"),
    [
        ("int8", 160, 64, "multiple of 64 inputs in int8, got 160"),
        ("fp8", 160, 64, "multiple of 64 inputs in float8_e4m3fn, got 160"),
        ("int4", 128, 12, "multiple of 8 outputs in int4, got 12"),
        ("fp8", 128, 12, "multiple of 8 outputs in fp8, got 12"),
        ("int8", 28672, 64, "quantised rows of 28672 inputs"),
    ],
)
def test_unsupported_names_the_constraint(fmt, inputs, outputs, message):
    x = jax.ShapeDtypeStruct((2, inputs), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(fused_small_batch_linear, x, shapes(fmt, outputs, inputs))


H200 = Target.load("h200").gpu
REALISTIC = {
    "gpt-j qkv": Case(rows=1, inputs=4096, outputs=12288, norm="layer"),
    "gpt-j down": Case(rows=8, inputs=16384, outputs=4096, bias=True, residual=True),
    "llama-3 8b up": Case(rows=1, inputs=4096, outputs=14336, norm="rms", gated=True),
    "llama-3 8b up, 16 rows": Case(rows=16, inputs=4096, outputs=14336, norm="rms", gated=True),
    "llama-3 8b down": Case(rows=1, inputs=14336, outputs=4096, residual=True),
    "gpt-2 xl qkv": Case(rows=1, inputs=1600, outputs=4800, norm="layer", bias=True),
    "gpt-2 xl down": Case(rows=8, inputs=6400, outputs=1600, bias=True, residual=True),
    "gpt-2 xl head": Case(rows=1, inputs=1600, outputs=50257),
    "gpt-j head": Case(rows=1, inputs=4096, outputs=50400, bias=True),
    "llama-3 8b head": Case(rows=8, inputs=4096, outputs=128256),
    "gpt-2 large qkv, float16": Case(rows=3, inputs=1280, outputs=3840, norm="layer", dtype=jnp.float16),
    "gpt-2 large down, float32": Case(rows=16, inputs=5120, outputs=1280, residual=True, dtype=jnp.float32),
}
EXPECTED = {  # SASS: TMA loads of the weights, ldmatrix, and the mma of each format
    "int8": {"UTMALDG", "LDSM", "IMMA"},
    "int4": {"UTMALDG", "LDSM", "HMMA"},
    "fp8": {"UTMALDG", "HMMA"},
}


def calls(fmt: str, case: Case) -> tuple[Any, tuple]:
    """The operation and the shapes of its arguments."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, case.dtype)

    x, weights = array(case.rows, case.inputs), shapes(fmt, case.outputs * (2 if case.gated else 1), case.inputs)
    bias = array(weights.shape[0]) if case.bias else None
    if case.norm:
        options = {"eps": 1e-5, "activation": "silu" if case.gated else None, "gated": case.gated}
        shift = array(case.inputs) if case.norm == "layer" else None
        return functools.partial(norm_linear, **options), (x, array(case.inputs), shift, weights, bias)
    if case.residual:
        return linear_residual, (x, weights, array(case.rows, case.outputs), bias)
    return small_batch_linear, (x, weights, bias)


CALLS = [  # an int4 model keeps matrices that groups of 128 do not divide, and odd vocabularies, in int8
    (name, fmt)
    for name, case in REALISTIC.items()
    for fmt in FORMATS
    if (fmt != "int4" or case.inputs % GROUP == 0) and (fmt == "int8" or case.outputs % 8 == 0)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fmt"), CALLS)
def test_lowers_for_cuda(name, fmt):
    """As one kernel, or two if many rows are quantised, without an XLA matmul."""
    operation, args = calls(fmt, REALISTIC[name])
    before = fmt == "int8" and REALISTIC[name].rows > MAX_RESIDENT_ROWS
    with targeting(H200):
        module = jax.jit(operation).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("mosaic_gpu_v2") == (2 if before else 1)
    assert "dot_general" not in module


def test_stages_are_smaller_where_shared_memory_is():
    """The two matrices of a gate and 16 rows of x in int4: full stages do not fit into 99 KiB."""
    operation, args = calls("int4", REALISTIC["llama-3 8b up, 16 rows"])
    with targeting(Target.load("rtx-5090").gpu):
        module = jax.jit(operation).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("mosaic_gpu_v2") == 1


@pytest.mark.aot
@pytest.mark.parametrize(("name", "fmt"), CALLS)
def test_compiles_without_spills(name, fmt):
    """To one kernel. Many rows are quantised by a kernel before it, or normalised by XLA."""
    case = REALISTIC[name]
    report = compile_for(Target.load("h200"), *calls(fmt, case), resources=True)
    *before, kernel = [kernel for kernel in report.kernels if kernel.kind == "mosaic"]
    many = case.rows > MAX_RESIDENT_ROWS
    assert len(before) == (many and fmt == "int8")
    # For a vocabulary XLA pads the scales and slices the result, which TMA writes in padded rows.
    assert len(report.kernels) == 1 + (many and (fmt == "int8" or case.norm is not None)) or case.outputs % 64
    assert kernel.resources is not None
    assert kernel.resources.spill_bytes == 0
    assert kernel.resources.registers <= 255
    assert kernel.shared_bytes <= 232_448
    assert EXPECTED[fmt] <= set(kernel.resources.features)
    partial = 2 * (kernel.cluster - 1) * kernel.grid // kernel.cluster * 64 * 16 * 4  # two of a gate, 16 columns
    rows = case.rows * case.inputs * 4 if many else 0
    assert report.temp_bytes <= partial + rows + (1 << 20 if case.outputs % 64 else 1024)


@pytest.mark.aot
def test_int4_unpacks_with_few_instructions():
    """A lane of an H200 can issue three per weight while memory delivers 4.8 TB/s, half of them logic instructions."""
    inputs, outputs = 4096, 4096
    weights = shapes("int4", outputs, inputs)
    x = jax.ShapeDtypeStruct((1, inputs), jnp.bfloat16)
    with Trial("small_batch_linear", {"tile_k": 512, "stages": 3, "split": 4}).active():
        report = compile_for(Target.load("h200"), small_batch_linear, (x, weights), resources=True)
    resources = report.kernels[0].resources
    assert resources is not None
    counts = resources.instructions
    weights_per_lane = 64 * 512 / 128
    logic = sum(count for name, count in counts.items() if name.startswith(("LOP3", "SHF", "PRMT")))
    arithmetic = sum(count for name, count in counts.items() if name.startswith("HADD2"))
    assert logic < 1.25 * weights_per_lane
    assert arithmetic <= 0.5 * weights_per_lane
