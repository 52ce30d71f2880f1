"""Tolerances of the GPU benchmark: a simulated tensor core is within them, a wrong element is not."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.numerics import error
from benchmarks.gpu.tolerances import tolerance

ROWS, OUTPUTS = 8, 32


def cut(x: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """x without what is below the last of the 24 bits of `largest`."""
    unit = np.exp2(np.frexp(largest)[1] - 24)
    return np.trunc(x / unit) * unit


def truncating_matmul(passes: list[tuple[np.ndarray, np.ndarray]], *, aligned: bool) -> np.ndarray:
    """sum of a b^T over the passes, [R, K] by [N, K], as a tensor core accumulates: 16 exact products at a time.

    aligned: products and accumulator are cut like the largest of them before they are added; else only their sum is.
    """
    acc = np.zeros((ROWS, OUTPUTS))
    for a, b in passes:
        for start in range(0, a.shape[1], 16):
            step = slice(start, start + 16)
            terms = np.concatenate([a[:, None, step] * b[None, :, step], acc[..., None]], axis=2)
            if aligned:
                terms = cut(terms, abs(terms).max(axis=2, keepdims=True))
            acc = terms.sum(axis=2)
            acc = cut(acc, np.maximum(abs(acc), 1e-30))
    return acc


def operands(inputs: int, dtype) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.asarray(jnp.asarray(rng.normal(size=(n, inputs)), dtype), np.float64) for n in (ROWS, OUTPUTS)]


def bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def split(x: np.ndarray) -> list[np.ndarray]:
    """float32 as three bfloat16."""
    high = bfloat16(x)
    middle = bfloat16(x - high)
    return [high, middle, bfloat16(x - high - middle)]


@pytest.mark.parametrize("inputs", [64, 1024, 6400])
def test_truncated_sums_are_within_the_tolerance(inputs):
    """Of bfloat16 operands, before the result is rounded: the part of the tolerance that is due to the sum."""
    a, b = operands(inputs, jnp.bfloat16)
    found = [error(truncating_matmul([(a, b)], aligned=aligned), a @ b.T) for aligned in (False, True)]
    allowed = tolerance("bfloat16", roundings=0, products=inputs)
    assert 0.05 * allowed < max(found) < allowed


@pytest.mark.parametrize("inputs", [1600, 6400])
def test_truncated_sums_in_float32_are_within_the_tolerance(inputs):
    """Six passes of bfloat16: further from the exact result than 1e-5."""
    a, b = operands(inputs, jnp.float32)
    parts_of_a, parts_of_b = split(a), split(b)
    passes = [(parts_of_a[i], parts_of_b[j]) for i in range(3) for j in range(3 - i)]
    found = [error(truncating_matmul(passes, aligned=aligned), a @ b.T) for aligned in (False, True)]
    assert 1e-5 < max(found) < tolerance("float32", products=inputs, passes=len(passes)) < 3e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_rounded_result_is_within_the_tolerance(dtype):
    a, b = operands(512, dtype)
    y = np.asarray(jnp.asarray(a @ b.T, dtype), np.float64)
    assert error(y, a @ b.T) <= tolerance(dtype) < 1.3 * 2 * error(y, a @ b.T)


def test_operands_of_another_dtype_are_outside():
    """float32 computed from operands in bfloat16, or in TensorFloat-32, which has 10 bits of mantissa."""
    a, b = operands(4096, jnp.float32)
    allowed = tolerance("float32", products=4096, passes=6)
    assert error(bfloat16(a) @ bfloat16(b).T, a @ b.T) > 10 * allowed
    tf32 = [np.ldexp(np.round(np.ldexp(*(np.frexp(x)[0], 11))), np.frexp(x)[1] - 11) for x in (a, b)]
    assert error(tf32[0] @ tf32[1].T, a @ b.T) > allowed


@pytest.mark.parametrize("shape", [(8, 64), (16, 6144), (512, 1024)])
def test_one_wrong_element_is_outside(shape):
    """However many others there are: an element that is its neighbour's, and one that lacks a tenth of its terms."""
    expected = np.random.default_rng(0).normal(size=shape)
    index = tuple(size // 2 for size in shape)
    neighbours = expected.copy()
    neighbours[index] = expected[index[0], index[1] + 1]
    lacking = expected.copy()
    lacking[index] += np.sqrt(0.1)
    allowed = tolerance("bfloat16", roundings=4, products=4096)
    for wrong in (neighbours, lacking):
        assert error(wrong, expected) > allowed
    assert error(bfloat16(expected), expected) < allowed


def test_sums_that_are_exact_have_the_error_of_rounding():
    assert tolerance("bfloat16") == 2.0**-8
    assert tolerance("bfloat16", roundings=4) == 2.0**-7
