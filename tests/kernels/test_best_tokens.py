"""The best token of a row, and the best few, as a CPU finds them and as a GPU does."""

import jax
import numpy as np
import pytest

from jaxinfer.pallas_kernels.sampling import fallbacks
from jaxinfer.pallas_kernels.sampling import reference as plain

ROWS = {
    "one best": [1.0, 3.0, 2.0],
    "the first of equals": [3.0, 1.0, 3.0],
    "nothing allowed": [-np.inf] * 3,
    "infinity": [0.0, np.inf, np.inf],
    "the first NaN": [np.inf, np.nan, np.nan],
    "zeros": [-0.0, 0.0, -0.0],
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_any_row(row):
    scores = np.array([[0.0, 1.0, 2.0], row], np.float32)
    for actual, expected in zip(fallbacks.max_and_argmax(scores), plain.max_and_argmax(scores), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_whole_vocabulary():
    scores = np.random.default_rng(0).normal(size=(8, 32_001)).astype(np.float32)
    best, index = fallbacks.max_and_argmax(scores)
    np.testing.assert_array_equal(index, scores.argmax(axis=-1))
    np.testing.assert_array_equal(best, scores.max(axis=-1))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_the_best_few_of_any_row(dtype):
    rows = np.random.default_rng(0).integers(-3, 4, (2, 3, 70)).astype(dtype)  # with many equals
    rows[0, 0, :] = np.iinfo(np.int32).min if dtype == np.int32 else -np.inf
    if dtype == np.float32:
        rows[0, 1, 5:60], rows[0, 1, 7], rows[0, 2, 50] = -np.inf, np.inf, np.nan
    for actual, expected in zip(plain.top_k(rows, 20), fallbacks.top_k(rows, 20), strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == expected.dtype
    assert isinstance(fallbacks.top_k(rows, 20), tuple)  # a program for two platforms has both


def test_the_best_few_are_found_without_a_sort():
    """A GPU's sort would keep the loop of decode steps out of a CUDA graph."""
    scores = jax.ShapeDtypeStruct((1, 64), np.float32)
    assert "stablehlo.sort" not in jax.jit(lambda x: plain.top_k(x, 4)).lower(scores).as_text()
    assert "top_k" in jax.jit(lambda x: fallbacks.top_k(x, 4)).lower(scores).as_text()
