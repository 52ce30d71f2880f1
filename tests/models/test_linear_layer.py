"""`Linear` computes its formulas with and without adapters, on one device and where its inputs are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxinfer.models import WeightFormat
from jaxinfer.models.config import Activation, NormConfig, NormKind
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.norm import Norm
from jaxinfer.sharding import MeshConfig

SILU = Activation.SILU
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
    for actual, expected in (
        (linear(x, adapter_delta=delta), product(x)),
        (linear.norm_linear(x, NORM, adapter_delta=delta), product(NORM(x))),
        (linear.norm_linear(x, NORM, activation=SILU, adapter_delta=delta), jax.nn.silu(product(NORM(x)))),
        (linear.norm_linear(x, NORM, activation=SILU, gated=True, adapter_delta=delta), jax.nn.silu(gate) * up),
        (linear.norm_linear(x, None, activation=SILU, adapter_delta=delta), jax.nn.silu(product(x))),
        (linear.linear_residual(x, residual, adapter_delta=delta), product(x) + residual),
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


# On a mesh


def split_inputs(linear, x, residual, *, ways, delta=None):
    """Run a linear whose inputs are split over so many devices, which add up their products once, in bfloat16."""
    graph, state = nnx.split(linear)
    specs = jax.tree.map(lambda leaf: P(None, "tensor") if leaf.ndim == 2 else P(), state)

    def run(state, x, residual):
        return nnx.merge(graph, state).linear_residual(x, residual, adapter_delta=delta)

    mesh = MeshConfig(tensor=ways).build()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs, P(None, "tensor"), P()), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(state, x, residual)


@pytest.mark.parametrize("ways", [3, pytest.param(5, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delta", [None, lambda x: 0 * x[..., :1]], ids=["plain", "adapted"])
def test_devices_that_add_up_their_products_leave_residual_and_bias_as_they_are(ways, delta):
    linear = Linear(8 * ways, 64, WeightFormat(dtype=jnp.bfloat16), axes=("embed", "mlp"), bias=True, rngs=nnx.Rngs(0))
    linear.bias[...] = jax.random.normal(jax.random.key(0), 64)
    residual, x = (jax.random.normal(jax.random.key(k), shape, jnp.bfloat16) for k, shape in ((1, 64), (2, 8 * ways)))
    residual, x = residual[None], x[None]
    unchanged = split_inputs(linear, 0 * x, residual, ways=ways, delta=delta)
    once = (residual.astype(jnp.float32) + linear.bias[...]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(unchanged.astype(jnp.float32), once.astype(jnp.float32))
    actual = split_inputs(linear, x, residual, ways=ways, delta=delta).astype(jnp.float32)
    product = x.astype(jnp.float32) @ linear.weight[...].astype(jnp.float32).T
    exact = product + residual.astype(jnp.float32) + linear.bias[...]
    rounded = 2.0**-8 * (np.abs(exact) + 2 * np.abs(product).max())  # of the result, and of the devices' parts
    assert (np.abs(actual - exact) <= rounded).all()
