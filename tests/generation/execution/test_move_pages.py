"""Pages leave the cache as blocks, and come back to other places as they were."""

import jax
import numpy as np
import pytest

from jaxinfer.generation.execution.programs.gather_pages import gather_pages
from jaxinfer.generation.execution.programs.scatter_pages import scatter_pages
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import KVPages

PAGES, HEADS = 7, ((2, 8), (1, 6), (2, 8))
"""KV heads and head size of each layer."""


def caches_of(dtype, seed):
    """Caches in which each page of each layer is different."""
    rng = np.random.default_rng(seed)
    shapes = [KVPages.shapes(PAGES, 4, *heads, np.dtype(dtype), int8=dtype == "int8") for heads in HEADS]
    return jax.tree.map(lambda x: rng.integers(-99, 99, x.shape).astype(x.dtype), shapes)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_come_back_as_they_were(dtype):
    caches, others = caches_of(dtype, 0), caches_of(dtype, 1)
    block = jax.jit(gather_pages)(caches, np.int32([5, 0, 2]))
    assert [x.shape for x in block.kv] == [(3, 2, 2, 4, 2, 8), (3, 1, 2, 4, 1, 6)]
    assert [x.shape for x in block.scale] == ([(3, 2, 2, 2), (3, 1, 2, 1)] if dtype == "int8" else [])
    targets = np.int32([1, PAGES, 6])  # the second is dropped
    moved = jax.jit(scatter_pages)(DeviceState(others, None), targets, block)
    found = jax.tree.map(np.asarray, moved.caches)
    for before, other, after in zip(caches, others, found, strict=True):
        for source, kept, changed in zip(*map(jax.tree.leaves, (before, other, after)), strict=True):
            np.testing.assert_array_equal(changed[[1, 6]], source[[5, 2]])
            rest = [0, 2, 3, 4, 5]
            np.testing.assert_array_equal(changed[rest], kept[rest])
