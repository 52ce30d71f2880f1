"""`Linear` computes its formula with and without adapters, and refuses what it has no operation for."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models import WeightFormat
from jaxinfer.models.config import Activation, NormConfig, NormKind
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import Norm

NORM = Norm(8, NormConfig(kind=NormKind.RMS))


@pytest.fixture(scope="module")
def linear():
    return Linear(8, 6, WeightFormat(), axes=("mlp", "embed"), bias=True, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (3, 8))


@pytest.mark.parametrize("delta", [None, lambda x: 0.1 * x[..., :6]], ids=["plain", "adapted"])
def test_formulas(linear, x, delta):
    def product(y):
        return y @ linear.weight[...].T + linear.bias[...] + (0 if delta is None else delta(y))

    residual = jax.random.normal(jax.random.key(1), (3, 6))
    gate, up = product(NORM(x))[:, 0::2], product(NORM(x))[:, 1::2]
    for found, expected in (
        (linear(x, adapter_delta=delta), product(x)),
        (linear(x, norm=NORM, activation=Activation.SILU, adapter_delta=delta), jax.nn.silu(product(NORM(x)))),
        (linear(x, norm=NORM, activation=Activation.SILU, gated=True, adapter_delta=delta), jax.nn.silu(gate) * up),
        (linear(x, residual=residual, adapter_delta=delta), product(x) + residual),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("beside", [{"norm": NORM}, {"activation": Activation.RELU}, {"gated": True}], ids=list)
def test_a_residual_is_refused_beside_a_norm_an_activation_or_a_gate(linear, x, beside):
    for delta in (None, lambda x: x[..., :6]):
        with pytest.raises(ValueError, match="adds a residual without a norm, an activation or a gate"):
            linear(x, residual=x[..., :6], adapter_delta=delta, **beside)
