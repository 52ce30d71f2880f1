"""Matrices: the two modules that have one, `Linear` and `Embedding`.

On a mesh each device has a part of a matrix (DeepSpeed Inference, section IV-A). Outputs that are split stay so; where
the inputs are split, every device has a partial sum, one `psum` adds them up, and bias and residual come after it.

Matrices take the format's dtype or are quantised; vectors (norms, biases, scales) stay in float32. Every parameter
names its dimensions (`axes`), which `sharding.ShardingRules` maps onto a mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.models.config import Activation
from jaxinfer.models.layers.low_rank import AdapterDelta
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import Weights, activate_outputs, linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.weights import QuantizedFormat, quantize
from jaxinfer.sharding.collectives import axis_size, local_index, mesh_axes, psum


def _matrix(
    shape: tuple[int, ...], axes: tuple[str, ...], dtype: np.dtype, quantized: QuantizedFormat | None, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param | None]:
    """Make a matrix, or several, and the scales: random in float, zero if quantised.

    Args:
      shape: (outputs, inputs), or with the number of matrices before them.
      axes: the names of these dimensions.
    """
    if quantized is None:
        return nnx.Param((0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype), axes=axes), None
    weight, scale = quantize(jnp.zeros(shape, jnp.float32), quantized)
    assert scale is not None
    grouped = scale.ndim == len(shape)  # int4: [groups of inputs, outputs]
    return nnx.Param(weight, axes=axes), nnx.Param(
        scale, axes=(*axes[:-2], axes[-1], axes[-2]) if grouped else axes[:-1]
    )


def _weights(weight: nnx.Param, scale: nnx.Param | None) -> Weights:
    """Join a matrix and its scales into an operand of `pallas_kernels`."""
    return Weights(weight[...], None if scale is None else scale[...])


class PartialSum(NamedTuple):
    """A sum over devices that is not finished.

    Attributes:
      part: what this device adds to it, [..., N].
      axes: the mesh axes of these devices; none: the sum is whole.
      once: what is added after it, the same on every device, [..., N] or [N]; None: nothing. Devices that add up
        rounded numbers must not round the residual stream with them, in every layer.
    """

    part: jax.Array
    axes: tuple[str, ...]
    once: jax.Array | None = None

    def finish(self) -> jax.Array:
        """Add up the parts of all devices; then add `once` in float32, rounded once."""
        total = lax.psum(self.part, self.axes) if self.axes else self.part
        if self.once is None:
            return total
        return (total.astype(jnp.float32) + self.once.astype(jnp.float32)).astype(total.dtype)


class Linear(nnx.Module):
    """x W^T + b, [..., K] -> [..., N], fused with what comes directly before and after the product.

    Attributes:
      weight: [N, K], or as `pallas_kernels.Weights` packs it.
      scale: the scales of a quantised weight, else None.
      bias: float32 [N], or None.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        weights: WeightFormat,
        *,
        axes: tuple[str, str],  # names of (outputs, inputs)
        bias: bool,
        rngs: nnx.Rngs,
    ):
        self.inputs_axis = axes[1]
        self.weight, self.scale = _matrix((outputs, inputs), axes, weights.dtype, weights.of_matrix(inputs), rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=axes[:1]) if bias else None

    def __call__(self, x: jax.Array, *, adapter_delta: AdapterDelta | None = None) -> jax.Array:
        """x W^T + b.

        Args:
          x: [..., K].
          adapter_delta: what adapters add to the product, which then runs unfused; the same in all methods.
        """
        if axis_size(self.inputs_axis) > 1:
            return self.partial_sum(x, adapter_delta=adapter_delta).finish()
        return self._product(x, self._bias, None, adapter_delta)

    def norm_linear(
        self,
        x: jax.Array,
        norm: Norm | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
        adapter_delta: AdapterDelta | None = None,
    ) -> jax.Array:
        """act(norm(x) W^T + b), where the inputs are not split.

        Args:
          x: [..., K].
          norm: normalises x; None: x is multiplied as it is.
          activation: applied to the outputs.
          gated: outputs alternate between gate and up; the result is act(gate) * up, [..., N / 2].
          adapter_delta: as above; comes before the activation.
        """
        assert axis_size(self.inputs_axis) == 1, "norms and activations take whole rows"
        if norm is None or adapter_delta is not None:
            y = self(x if norm is None else norm(x), adapter_delta=adapter_delta)
            return activate_outputs(y, activation, gated=gated)
        weights, (scale, shift) = _weights(self.weight, self.scale), norm.parameters
        return norm_linear(x, scale, shift, weights, self._bias, eps=norm.eps, activation=activation, gated=gated)

    def linear_residual(
        self, x: jax.Array, residual: jax.Array, *, adapter_delta: AdapterDelta | None = None
    ) -> jax.Array:
        """residual + x W^T + b.

        Args:
          x: [..., K].
          residual: [..., N].
          adapter_delta: as above.
        """
        if axis_size(self.inputs_axis) > 1:
            return self.partial_sum(x, residual, adapter_delta=adapter_delta).finish()
        return self._product(x, self._bias, residual, adapter_delta)

    def partial_sum(
        self,
        x: jax.Array,
        residual: jax.Array | PartialSum | None = None,
        *,
        adapter_delta: AdapterDelta | None = None,
    ) -> PartialSum:
        """residual + x W^T + b where the inputs are split, for a caller that has more to add before `finish`.

        Args:
          x: [..., K].
          residual: [..., N], or a sum over the same devices that this one continues.
          adapter_delta: as above.
        """
        axes = mesh_axes(self.inputs_axis)
        if isinstance(residual, PartialSum):
            assert residual.axes == axes
            part, once = residual.part, residual.once
        else:
            part, once = None, residual
        if self.bias is not None:
            bias = self.bias[...]
            once = bias if once is None else once.astype(jnp.float32) + bias
        return PartialSum(self._product(x, None, part, adapter_delta), axes, once)

    @property
    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]

    def _product(
        self,
        x: jax.Array,
        bias: jax.Array | None,
        residual: jax.Array | None,
        adapter_delta: AdapterDelta | None,
    ) -> jax.Array:
        """Multiply this device's inputs, and add to the product what is given."""
        weights = _weights(self.weight, self.scale)
        if adapter_delta is None and residual is not None:
            return linear_residual(x, weights, residual, bias)
        y = small_batch_linear(x, weights, bias)
        if adapter_delta is not None:
            y += adapter_delta(x)
        return y if residual is None else y + residual


class Stack(nnx.Module):
    """Matrices of the same shape, one for each expert, which `pallas_kernels.moe` multiplies with.

    Attributes:
      weight: [E, N, K], or as `pallas_kernels.Weights` packs it.
      scale: the scales of quantised weights, else None.
      bias: float32 [E, N], or None.
    """

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        weights: WeightFormat,
        *,
        axes: tuple[str, str],  # names of (outputs, inputs)
        bias: bool,
        rngs: nnx.Rngs,
    ):
        shape, names = (count, outputs, inputs), ("experts", *axes)
        self.weight, self.scale = _matrix(shape, names, weights.dtype, weights.of_matrix(inputs), rngs)
        self.bias = nnx.Param(jnp.zeros(shape[:2], jnp.float32), axes=names[:2]) if bias else None

    @property
    def weights(self) -> Weights:
        """The matrices as an operand of `pallas_kernels`."""
        return _weights(self.weight, self.scale)

    @property
    def biases(self) -> jax.Array | None:
        """float32 [E, N], or None."""
        return None if self.bias is None else self.bias[...]


class Embedding(nnx.Module):
    """A table of vectors, looked up by id; also the output projection of a tied model.

    Attributes:
      table: [rows, D].
      scale: float32 [rows] in int8 and fp8, else None. Row by row, it is per output channel in the projection too.
    """

    def __init__(self, rows: int, embed: int, weights: WeightFormat, *, axes: tuple[str, str], rngs: nnx.Rngs):
        self.dtype, self.rows_axis = weights.dtype, axes[0]
        self.table, self.scale = _matrix((rows, embed), axes, weights.dtype, weights.of_table, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[...] -> [..., D]. Where the rows are split, the device that has a row gives it to all."""
        if axis_size(self.rows_axis) == 1:
            return self._rows(ids)
        size = len(self.table[...])
        local = local_index(ids, self.rows_axis, size)
        rows = self._rows(jnp.minimum(local, size - 1))
        return psum(jnp.where(local[..., None] < size, rows, 0), self.rows_axis)

    def _rows(self, ids: jax.Array) -> jax.Array:
        """Look up ids of rows on this device: [...] -> [..., D]."""
        rows = self.table[...][ids]
        if self.scale is None:
            return rows
        return (rows.astype(jnp.float32) * self.scale[...][ids][..., None]).astype(self.dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """x table^T: [..., D] -> [..., rows], of those on this device."""
        return small_batch_linear(x, _weights(self.table, self.scale))
