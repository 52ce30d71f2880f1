"""W8A8 matmul of many rows: the kernels against the references, those against float64, and the compiled kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels.dispatch import without_kernels
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.quantization.api import norm_quantize, quantize_rows, quantized_matmul
from jaxinfer.pallas_kernels.quantization.mosaic import matmul, quantize
from jaxinfer.pallas_kernels.quantization.mosaic.matmul import Tiles, choose_tiles
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from tests.kernels.interpreting import without_races

H200 = Target.load("h200").gpu


def case(rows, inputs, outputs, *, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, inputs)) * 3 + 1, dtype),
        "norm": (jnp.asarray(rng.normal(size=inputs), jnp.float32), jnp.asarray(rng.normal(size=inputs), jnp.float32)),
        "q": jnp.asarray(rng.integers(-127, 128, (rows, inputs)), jnp.int8),
        "q_scale": jnp.asarray(rng.uniform(0.01, 0.1, (rows, 1)), jnp.float32),
        "weight": jnp.asarray(rng.integers(-127, 128, (outputs, inputs)), jnp.int8),
        "scale": jnp.asarray(rng.uniform(0.01, 0.1, outputs), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=outputs), jnp.float32),
    }


MATMUL = ("q", "q_scale", "weight", "scale", "bias")


@settings(max_examples=10)
@given(
    rows=st.sampled_from([1, 5]),
    inputs=st.sampled_from([3, 40]),
    outputs=st.sampled_from([1, 12]),
    biased=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_matmul_is_exact_before_scaling(rows, inputs, outputs, biased, seed):
    q, q_scale, weight, scale, bias = (case(rows, inputs, outputs, seed=seed)[name] for name in MATMUL)
    y = quantized_matmul(q, q_scale, weight, scale, bias if biased else None, dtype=jnp.float32)
    exact = (
        np.asarray(q, np.int64) @ np.asarray(weight, np.int64).T * np.asarray(q_scale, np.float64) * np.asarray(scale)
    )
    np.testing.assert_allclose(y, exact + np.asarray(bias if biased else 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shifted", [True, False])
def test_norm_quantize_rounds_the_norm(shifted):
    x, (scale, shift) = (case(7, 96, 1, dtype=jnp.float32)[name] for name in ("x", "norm"))
    q, q_scale = norm_quantize(x, scale, shift if shifted else None, eps=1e-5)
    y = np.asarray(x, np.float64)
    y -= y.mean(axis=1, keepdims=True) if shifted else 0
    y = y / np.sqrt((y**2).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(scale) + np.asarray(shift if shifted else 0)
    assert np.abs(y - q * np.asarray(q_scale)).max() <= q_scale.max() * 0.501
    np.testing.assert_array_equal(np.abs(q).max(axis=1), 127)


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "inputs"), [((3,), 128), ((2, 2), 640), ((1,), 1024)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_quantizes(rows, inputs, dtype):
    args = case(int(np.prod(rows)), inputs, 1, dtype=dtype)
    x, (scale, shift) = args["x"].reshape(*rows, inputs), args["norm"]
    x = x.at[(0,) * len(rows)].set(0)  # a row of zeros
    for operation in (
        quantize_rows,
        lambda x: norm_quantize(x, scale, shift, eps=1e-5),
        lambda x: norm_quantize(x, scale, None, eps=1e-5),
    ):
        with without_races():
            q, q_scale = operation(x)
        expected, expected_scale = operation(x)
        assert (q.dtype, q.shape, q_scale.shape) == (jnp.int8, x.shape, (*rows, 1))
        np.testing.assert_allclose(q_scale, expected_scale, rtol=1e-6)
        # A sum in a different order may round an element in the middle of two steps the other way.
        assert np.abs(np.asarray(q, np.int32) - np.asarray(expected, np.int32)).max() <= 1
        assert np.mean(np.asarray(q) != np.asarray(expected)) < 0.001


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((37, 256, 96), None),  # partial tiles of rows and outputs
        ((130, 464, 136), Tiles(rows=128, outputs=128, stages=2)),  # partial tiles everywhere; stages are refilled
        ((70, 128, 64), Tiles(rows=64, outputs=64, stages=1)),
    ],
)
def test_matmul(shape, tiles, dtype):
    q, q_scale, weight, scale, bias = (case(*shape)[name] for name in MATMUL)
    trial = Trial("quantized_matmul", tiles and dataclasses.asdict(tiles))
    with trial.active(), without_races():
        y = quantized_matmul(q, q_scale, weight, scale, bias, dtype=dtype)
    assert [operation for operation, _ in trial.lookups] == ["quantized_matmul"]
    expected = quantized_matmul(q, q_scale, weight, scale, bias, dtype=dtype)
    assert y.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8  # the integer sums are equal; one rounding
    y, expected = (np.asarray(part, np.float32) for part in (y, expected))
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=1e-4)


@pytest.mark.interpreted
def test_matmul_kernel_without_bias_over_more_dimensions():
    q, q_scale, weight, scale, _ = (case(40, 128, 64)[name] for name in MATMUL)
    args = (q.reshape(2, 20, 128), q_scale.reshape(2, 20, 1), weight, scale)
    with without_races():
        y = quantized_matmul(*args, dtype=jnp.float32)
    np.testing.assert_allclose(y, quantized_matmul(*args, dtype=jnp.float32), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((20, 264, 64), "a multiple of 16 bytes, got 264 bytes of inputs"),
        ((20, 256, 60), "a multiple of 16 bytes, got 120 bytes of outputs"),
        ((20, 64, 64), "a stage holds 128 inputs, got 64"),
    ],
)
def test_matmul_unsupported(shape, message):
    with pytest.raises(UnsupportedError, match=message):
        matmul(*(case(*shape)[name] for name in MATMUL), dtype=jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize("inputs", [100, 16_512])
def test_quantize_unsupported(inputs):
    with pytest.raises(UnsupportedError, match=f"a multiple of 128, at most 16384 inputs, got {inputs}"):
        quantize(jnp.ones((2, inputs)))


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        (2048, 4096, (128, 128)),
        (512, 4096, (64, 128)),
        (256, 4096, (64, 64)),
        (40, 4096, (32, 64)),
        (20, 128, (32, 64)),
    ],
)
def test_tiles_give_every_sm_a_thread_block(rows, outputs, expected):
    with targeting(H200):
        tiles = choose_tiles(rows, 4096, outputs)
    assert (tiles.rows, tiles.outputs) == expected


def test_fewer_sms_need_fewer_thread_blocks():
    with targeting(Target.load("h20").gpu):
        assert choose_tiles(512, 4096, 4096).rows == 128  # 128 of them, fewer than an H200's 132 SMs


def test_little_shared_memory_holds_one_thread_block_of_large_tiles():
    with targeting(Target.load("rtx-5090").gpu):
        assert choose_tiles(2048, 4096, 14_336) == Tiles(rows=128, outputs=128, stages=2)
        assert choose_tiles(20, 4096, 4096) == Tiles(rows=32, outputs=64, stages=3)


SHAPES = [(2048, 4096, 16_384), (512, 4096, 4096), (256, 11_008, 4096), (33, 4096, 4096)]


def step(x, scale, shift, weight, channel, bias):
    q, q_scale = norm_quantize(x, scale, shift, eps=1e-5)
    y = quantized_matmul(q, q_scale, weight, channel, bias, dtype=x.dtype)
    return y, quantize_rows(y)


def shapes(rows, inputs, outputs):
    args = jax.eval_shape(lambda: case(1, 1, 1))
    sizes = {"x": (rows, inputs), "weight": (outputs, inputs), "scale": (outputs,), "bias": (outputs,)}
    arrays = {name: jax.ShapeDtypeStruct(size, args[name].dtype) for name, size in sizes.items()}
    vector = jax.ShapeDtypeStruct((inputs,), jnp.float32)
    return arrays["x"], vector, vector, arrays["weight"], arrays["scale"], arrays["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_lowers_for_cuda(shape):
    with targeting(H200):
        text = jax.jit(step).trace(*shapes(*shape)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 3
        with without_kernels():
            plain = jax.jit(lambda *args: step(*args)).trace(*shapes(*shape)).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu_v2" not in plain.as_text()


@pytest.mark.aot
@pytest.mark.parametrize("shape", SHAPES)
def test_ahead_of_time(shape):
    report = compile_for(Target.load("h200"), step, shapes(*shape), resources=True)
    kernels = {kernel.name: kernel for kernel in report.kernels if kernel.kind == "mosaic"}
    assert kernels.keys() == {"norm_quantize", "quantized_matmul", "quantize_rows"}
    assert all(kernel.resources.spill_bytes == 0 for kernel in kernels.values())
    matmul = kernels["quantized_matmul"]
    assert matmul.resources.registers * matmul.threads * 2 <= 65_536  # two thread blocks per SM
    assert (matmul.shared_bytes + 1024) * 2 <= 228 << 10
    assert {"UTMALDG", "UTMASTG", "LDSM", "IMMA"} <= set(matmul.resources.features)
    if shape[1] % 1024 == 0:  # else the vector size is smaller
        assert "LDG.128" in kernels["norm_quantize"].resources.features
