"""The best token of a row, as a CPU finds it: `pallas_kernels/sampling/fallbacks.py`."""

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
