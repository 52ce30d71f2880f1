"""Convolutions: every way of computing them gives the same."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.compiled.target import Target
from jaxinfer.models import WeightFormat
from jaxinfer.models.layers.convolution import Conv, max_pool
from jaxinfer.pallas_kernels.convolution import xla
from jaxinfer.pallas_kernels.target import targeting
from tests.models import vision


def by_hand(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int, padding: int) -> np.ndarray:
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0))).astype(np.float64)
    size = len(weight)
    rows, columns = ((side - size) // stride + 1 for side in x.shape[1:3])
    y = np.zeros((len(x), rows, columns, weight.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
            y[:, i, j] = np.einsum("bhwi,hwio->bo", window, weight) + bias
    return y


@pytest.mark.parametrize("small_grid", [0, 400], ids=["convolution", "product"])
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(1, 1, None), (1, 2, None), (3, 1, None), (3, 2, None), (6, 2, 2), (7, 2, None)]
)
def test_as_by_hand(size, stride, padding, small_grid, monkeypatch):
    monkeypatch.setattr(xla, "SMALL_GRID", small_grid)
    conv = Conv(3, 5, WeightFormat(), size=size, stride=stride, padding=padding, rngs=nnx.Rngs(0))
    conv.bias[...] = jax.numpy.arange(5.0)
    x = np.random.default_rng(0).normal(size=(2, 9, 12, 3)).astype(np.float32)
    expected = by_hand(x, np.asarray(conv.weight[...]), np.arange(5.0), stride, conv.padding)
    np.testing.assert_allclose(vision.run(conv, x), expected, atol=1e-5)


def test_only_a_cpu_multiplies_patches():
    conv = Conv(3, 5, WeightFormat(), size=3, rngs=nnx.Rngs(0))

    def lowered(platform):
        traced = jax.jit(lambda x: conv(x)).trace(jax.ShapeDtypeStruct((1, 7, 7, 3), np.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "convolution" not in lowered("cpu")
    with targeting(Target.load("h200").gpu):
        assert "convolution" in lowered("cuda")


def test_max_pool_never_takes_the_border():
    x = np.full((1, 3, 3, 1), -5.0, np.float32)
    x[0, 1, 1] = -1
    assert vision.run(lambda x: max_pool(x, size=3, stride=2), x).ravel().tolist() == [-1] * 4
    assert vision.run(lambda x: max_pool(x[:, :1], size=3), x).ravel().tolist() == [-5] * 3
