"""Linear layers of a few rows with norm, activation, gate and residual: kernels and fallbacks against float64."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels.activations import activate, approximate_erf
from jaxinfer.pallas_kernels.linear.api import linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.linear.mosaic.operands import Operand
from jaxinfer.pallas_kernels.linear.mosaic.small_batch import MAX_RESIDENT_ROWS, Norm, fused_small_batch_linear
from jaxinfer.pallas_kernels.linear.mosaic.tiles import FusedLinear, Tiles, choose_tiles
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from jaxinfer.pallas_kernels.weights import Weights
from tests.kernels.interpreting import without_races

EPS = 1e-5
H200 = Target.load("h200").gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What to compute. norm: "layer", "rms" or None; outputs: columns of the result."""

    rows: int
    inputs: int
    outputs: int
    dtype: type = jnp.bfloat16
    norm: str | None = None
    activation: str | None = None
    gated: bool = False
    bias: bool = False
    residual: bool = False

    def arrays(self, seed=0) -> Any:
        """x, weights, bias, residual, scale and shift; None for those that the problem does not have."""
        rng = np.random.default_rng(seed)
        channels = self.outputs * (2 if self.gated else 1)
        x = rng.normal(size=(self.rows, self.inputs)) + 0.5
        return (
            jnp.asarray(x, self.dtype),
            Weights(jnp.asarray(rng.normal(size=(channels, self.inputs)) / math.sqrt(self.inputs), self.dtype)),
            jnp.asarray(rng.normal(size=channels), jnp.float32) if self.bias else None,
            jnp.asarray(rng.normal(size=(self.rows, self.outputs)), self.dtype) if self.residual else None,
            jnp.asarray(1 + 0.1 * rng.normal(size=self.inputs), jnp.float32) if self.norm else None,
            jnp.asarray(0.1 * rng.normal(size=self.inputs), jnp.float32) if self.norm == "layer" else None,
        )

    def shapes(self) -> Any:
        """The shapes of the same."""
        channels = self.outputs * (2 if self.gated else 1)
        shape: Any = jax.ShapeDtypeStruct
        return (
            shape((self.rows, self.inputs), self.dtype),
            Weights(shape((channels, self.inputs), self.dtype)),
            shape((channels,), jnp.float32) if self.bias else None,
            shape((self.rows, self.outputs), self.dtype) if self.residual else None,
            shape((self.inputs,), jnp.float32) if self.norm else None,
            shape((self.inputs,), jnp.float32) if self.norm == "layer" else None,
        )

    def kernel(self, x, weights, bias, residual, scale, shift):
        norm = None if scale is None else Norm(scale, shift)
        return fused_small_batch_linear(
            x, weights, bias, residual, norm, eps=EPS, activation=self.activation, gated=self.gated
        )

    def op(self, x, weights, bias, residual, scale, shift):
        """The public operation that computes this problem."""
        if scale is not None:
            return norm_linear(x, scale, shift, weights, bias, eps=EPS, activation=self.activation, gated=self.gated)
        return small_batch_linear(x, weights, bias) if residual is None else linear_residual(x, weights, residual, bias)

    def exact(self, x, weights, bias, residual, scale, shift):
        """The result in float64; normalised rows are rounded to the dtype, as the operation specifies."""

        def double(array):
            return np.asarray(array).astype(np.float64)

        x = double(x)
        if scale is not None:
            if shift is not None:
                x = x - x.mean(axis=-1, keepdims=True)
            x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * double(scale)
            x = double(jnp.asarray(x if shift is None else x + double(shift), self.dtype))
        y = x @ double(weights.weight).T
        if bias is not None:
            y = y + double(bias)
        gate, up = (y[:, ::2], y[:, 1::2]) if self.gated else (y, 1)
        y = nonlinear(gate, self.activation) * up
        return y if residual is None else y + double(residual)


def nonlinear(y, name):
    match name:
        case "gelu":
            return 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        case "relu":
            return np.maximum(y, 0)
        case "relu2":
            return np.maximum(y, 0) ** 2
        case "silu":
            return y / (1 + np.exp(-y))
    return y


def check(y, exact, dtype, *, roundings=1):
    """Results are float32 sums of order 1, rounded `roundings` times to the dtype.

    A normalised input may round the other way in the dtype, which changes a sum by at most a unit in the last place of
    one of its terms: 3 x 2^-8 x 3 / sqrt(inputs).
    """
    digits = {jnp.float32: 2e-6, jnp.float16: 2**-11, jnp.bfloat16: 2**-8}[dtype]
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, rtol=roundings * digits, atol=1.5 * digits)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "relu2", "silu"])
def test_activations(name):
    x = jnp.linspace(-9, 9, 1001)
    exact = nonlinear(np.asarray(x, np.float64), name)
    for erf in (jax.lax.erf, approximate_erf):
        np.testing.assert_allclose(activate(x, name, erf=erf), exact, atol=2e-6, rtol=1e-6)
    assert activate(x.astype(jnp.bfloat16), name).dtype == jnp.bfloat16


def test_unknown_activations_are_named():
    with pytest.raises(ValueError, match="'swish'"):
        activate(jnp.ones(3), "swish")


P = Problem
KERNELS = {
    "one row, partial tiles": (P(rows=1, inputs=192, outputs=72, residual=True), Tiles(tile_k=128, stages=2, split=1)),
    "stages are refilled": (P(rows=3, inputs=320, outputs=64, bias=True), Tiles(tile_k=64, stages=2, split=1)),
    "a vocabulary": (P(rows=9, inputs=128, outputs=75), Tiles(tile_k=64, stages=2, split=1)),
    "unequal splits": (P(rows=8, inputs=192, outputs=64, activation="gelu"), Tiles(tile_k=64, stages=3, split=2)),
    "an empty split": (P(rows=2, inputs=192, outputs=64, residual=True), Tiles(tile_k=128, stages=1, split=3)),
    "float16": (P(rows=16, inputs=128, outputs=64, dtype=jnp.float16), Tiles(tile_k=64, stages=1, split=2)),
    "float32": (
        P(rows=3, inputs=96, outputs=64, dtype=jnp.float32, bias=True, residual=True, activation="gelu_tanh"),
        Tiles(tile_k=32, stages=2, split=2),
    ),
    "layer norm": (
        P(rows=3, inputs=320, outputs=64, norm="layer", bias=True, activation="relu"),
        Tiles(tile_k=64, stages=2, split=2),
    ),
    "rms norm of one row": (P(rows=1, inputs=256, outputs=72, norm="rms"), Tiles(tile_k=64, stages=2, split=3)),
    "gate": (
        P(rows=9, inputs=128, outputs=64, norm="rms", gated=True, activation="silu", bias=True),
        Tiles(tile_k=64, stages=2, split=2),
    ),
    "gate in float32": (
        P(rows=2, inputs=128, outputs=64, norm="layer", gated=True, activation="silu", dtype=jnp.float32),
        Tiles(tile_k=32, stages=3, split=1),
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name):
    problem, tiles = KERNELS[name]
    arrays = problem.arrays()
    with Trial("small_batch_linear", dataclasses.asdict(tiles)).active(), without_races():
        y = problem.kernel(*arrays)
    check(y, problem.exact(*arrays), problem.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("norm", [None, "layer", "rms"])
@pytest.mark.parametrize("gated", [False, True])
def test_kernel_in_more_cases(rows, dtype, norm, gated):
    problem = P(
        rows=rows, inputs=448, outputs=136, dtype=dtype, norm=norm, gated=gated, residual=not gated, activation="gelu"
    )
    arrays = problem.arrays(seed=rows)
    with without_races():  # with the heuristic's tiles
        y = problem.kernel(*arrays)
    check(y, problem.exact(*arrays), dtype)


@settings(max_examples=15)
@given(data=st.data())
def test_operations_on_any_platform(data):
    norm = data.draw(st.sampled_from([None, "layer", "rms"]))
    problem = P(
        rows=data.draw(st.integers(1, 20)),
        # Of two numbers that are nearly equal, rounding their mean decides what a norm makes of them.
        inputs=data.draw(st.integers(8 if norm == "layer" else 2, 70)),
        outputs=data.draw(st.integers(1, 20)),
        dtype=data.draw(st.sampled_from([jnp.float32, jnp.bfloat16])),
        norm=norm,
        activation=data.draw(st.sampled_from([None, "gelu", "gelu_tanh", "relu", "relu2", "silu"])) if norm else None,
        gated=norm is not None and data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        residual=norm is None and data.draw(st.booleans()),
    )
    arrays = problem.arrays(seed=data.draw(st.integers(0, 100)))
    y, exact = jax.jit(problem.op)(*arrays), problem.exact(*arrays)
    # Norm, matmul, bias, activation, gate and residual are each rounded, even if they nearly cancel.
    tolerance = 1e-5 if problem.dtype == jnp.float32 else 6e-2
    assert y.shape == exact.shape
    assert y.dtype == problem.dtype
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.interpreted
def test_leading_dimensions_and_the_dtype_are_kept():
    x, weights, _, residual, *_ = P(rows=6, inputs=64, outputs=16, residual=True).arrays()
    expected = linear_residual(x, weights, residual)
    y = linear_residual(x.reshape(2, 3, 64), weights, residual.reshape(2, 3, 16))
    np.testing.assert_array_equal(y.reshape(6, 16), expected)
    with without_races():
        y = small_batch_linear(x.reshape(2, 3, 64), weights, jnp.ones(16))  # a bias that is not a multiple of TILE_N
    assert y.shape == (2, 3, 16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y), np.float32(x @ weights.weight.T + 1).reshape(2, 3, 16), atol=3e-2)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (P(rows=17, inputs=64, outputs=64), "1 to 16 rows, got 17"),
        (P(rows=1, inputs=72, outputs=64), "multiple of 64 inputs in bfloat16, got 72"),
        (P(rows=1, inputs=96, outputs=64, dtype=jnp.float32, norm="rms"), "multiple of 64 inputs in float32, got 96"),
        (P(rows=1, inputs=64, outputs=75, residual=True), "residual of 75 in bfloat16"),
        (P(rows=1, inputs=64, outputs=64, dtype=jnp.int32), "got int32"),
        (P(rows=1, inputs=64 * 81, outputs=64, norm="rms"), "normalised rows of 5184 inputs"),
        (P(rows=MAX_RESIDENT_ROWS, inputs=64 * 1024, outputs=64, norm="rms"), "normalised rows of 65536 inputs"),
    ],
)
def test_unsupported_names_the_constraint(problem, message):
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(problem.kernel, *problem.shapes())


@pytest.mark.parametrize("split", [0, 9, 16])
def test_clusters_that_a_gpu_may_refuse_are_unsupported(split):
    """At the launch, a refused cluster would end the process."""
    problem = P(rows=1, inputs=64 * 16, outputs=64)
    with (
        Trial("small_batch_linear", {"tile_k": 64, "stages": 2, "split": split}).active(),
        pytest.raises(UnsupportedError, match=f"1 to 8 thread blocks, got {split}"),
    ):
        jax.eval_shape(problem.kernel, *problem.shapes())


def test_other_dtypes_of_weights_and_residual_are_unsupported():
    x, weights, _, residual, *_ = P(rows=1, inputs=64, outputs=64, residual=True).arrays()
    with pytest.raises(UnsupportedError, match="weights in x's dtype bfloat16, got float32"):
        fused_small_batch_linear(x, Weights(weights.weight.astype(jnp.float32)))
    with pytest.raises(UnsupportedError, match="residual in x's dtype bfloat16, got float32"):
        fused_small_batch_linear(x, weights, None, residual.astype(jnp.float32))


REALISTIC = {
    "gpt-j-6b qkv": P(rows=1, inputs=4096, outputs=12288, norm="layer"),
    "gpt-j-6b down": P(rows=8, inputs=16384, outputs=4096, bias=True, residual=True),
    "gpt-j-6b up": P(rows=16, inputs=4096, outputs=16384, norm="layer", bias=True, activation="gelu_tanh"),
    "gpt-2 xl qkv": P(rows=1, inputs=1600, outputs=4800, norm="layer", bias=True),
    "gpt-2 xl up": P(rows=8, inputs=1600, outputs=6400, norm="layer", bias=True, activation="gelu_tanh"),
    "gpt-2 xl up, float32": P(rows=8, inputs=1600, outputs=6400, norm="layer", dtype=jnp.float32),
    "gpt-2 xl down": P(rows=5, inputs=6400, outputs=1600, bias=True, residual=True),
    "gpt-2 qkv": P(rows=8, inputs=768, outputs=2304, norm="layer", bias=True, dtype=jnp.float16),
    "gpt-2 out": P(rows=1, inputs=768, outputs=768, bias=True, residual=True, dtype=jnp.float32),
    "llama-3 8b qkv": P(rows=1, inputs=4096, outputs=6144, norm="rms"),
    "llama-3 8b out": P(rows=11, inputs=4096, outputs=4096, residual=True),
    "llama-3 8b up": P(rows=1, inputs=4096, outputs=14336, norm="rms", gated=True, activation="silu"),
    "llama-3 8b up, 16 rows": P(rows=16, inputs=4096, outputs=14336, norm="rms", gated=True, activation="silu"),
    "llama-3 8b down": P(rows=1, inputs=14336, outputs=4096, residual=True),
    "llama-3 8b head": P(rows=8, inputs=4096, outputs=128256),
    "llama-3 8b up, float32": P(
        rows=8, inputs=4096, outputs=14336, norm="rms", gated=True, activation="silu", dtype=jnp.float32
    ),
    "opt-13b up": P(rows=8, inputs=5120, outputs=20480, norm="layer", bias=True, activation="relu"),
    "neox-20b up": P(rows=16, inputs=6144, outputs=24576, norm="layer", bias=True, activation="gelu"),
    "llama-2 70b up": P(rows=8, inputs=8192, outputs=28672, norm="rms", gated=True, activation="silu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_lowers_for_cuda(name):
    """As one kernel; XLA does nothing but reshapes before and after it, and normalises many rows."""
    problem = REALISTIC[name]
    shapes = problem.shapes()
    with targeting(H200):
        module = jax.jit(problem.op).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("mosaic_gpu_v2") == 1
    assert "dot_general" not in module


@pytest.mark.parametrize("gpu", [Target.load(name).gpu for name in ("h200", "h100-pcie", "h20", "b200")], ids=str)
@pytest.mark.parametrize("name", REALISTIC)
def test_heuristic(name, gpu):
    """No split without inputs; a thread block for most SMs; 64 KB of weights in flight to each SM, or all there are."""
    problem = REALISTIC[name]
    dtype = jnp.dtype(problem.dtype)
    layer = FusedLinear(
        rows=problem.rows,
        inputs=problem.inputs,
        outputs=problem.outputs,
        matrices=2 if problem.gated else 1,
        operand=Operand(dtype=dtype, x=dtype, weights=dtype),
        eps=EPS if problem.norm and problem.rows <= MAX_RESIDENT_ROWS else None,
        activation=problem.activation,
    )
    with targeting(gpu):
        tiles = choose_tiles(layer)
    total = math.ceil(problem.inputs / tiles.tile_k)
    tiles_per_split = math.ceil(total / tiles.split)
    assert (tiles.split - 1) * tiles_per_split < total
    assert tiles.stages <= tiles_per_split
    assert math.ceil(problem.outputs / 64) * tiles.split >= 0.9 * gpu.sms or tiles_per_split <= 2
    stage_bytes = (2 if problem.gated else 1) * 64 * tiles.tile_k * dtype.itemsize
    assert stage_bytes * tiles.stages >= 32_768 or tiles.stages == tiles_per_split


def test_little_shared_memory():
    problem = P(rows=MAX_RESIDENT_ROWS, inputs=16_384, outputs=4096, norm="rms")
    with targeting(Target.load("rtx-5090").gpu), pytest.raises(UnsupportedError, match=r"no room .* in 101376 bytes"):
        jax.eval_shape(problem.kernel, *problem.shapes())


@pytest.mark.aot
@pytest.mark.parametrize("name", REALISTIC)
def test_compiles_without_spills(name):
    """To one kernel; XLA normalises many rows before it, or pads them to whole tiles."""
    problem = REALISTIC[name]
    report = compile_for(Target.load("h200"), problem.op, problem.shapes(), resources=True)
    *before, kernel = report.kernels
    normalized = problem.norm is not None and problem.rows > MAX_RESIDENT_ROWS
    prepared = normalized or (problem.rows > 8 and problem.rows % 8 > 0)
    assert [kernel.kind == "mosaic" for kernel in before] == [False] * prepared
    assert kernel.resources is not None
    assert kernel.kind == "mosaic"
    assert kernel.resources.spill_bytes == 0
    assert kernel.resources.registers <= 255
    assert kernel.shared_bytes <= 232_448
    assert {"UTMALDG", "HMMA"} <= set(kernel.resources.features)
    assert "LDSM" in kernel.resources.features or problem.dtype == jnp.float32  # `ldmatrix` moves 16 bits
    partial = 2 * (kernel.cluster - 1) * kernel.grid // kernel.cluster * 64 * 16 * 4  # two of a gate, 16 columns
    rows = -(-problem.rows // 8) * 8 * problem.inputs * problem.dtype.dtype.itemsize if prepared else 0
    assert report.temp_bytes <= partial + rows + 1024
