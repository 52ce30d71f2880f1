"""The kernel that quantises rows to int8, after a norm or without one."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import plgpu
from jaxinfer.pallas_kernels.mosaic.layout import load
from jaxinfer.pallas_kernels.mosaic.refs import Ref, gmem
from jaxinfer.pallas_kernels.target import UnsupportedError

_THREADS = 128  # of a warpgroup
_MAX_INPUTS = 16_384  # of a row in registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch. eps: of the norm."""

    rows: int
    inputs: int
    eps: float

    @property
    def layout(self) -> Any:
        """Register layout of a row."""
        vec_size = next(size for size in (8, 4, 2, 1) if self.inputs % (_THREADS * size) == 0)
        return plgpu.Layout.WG_STRIDED((self.inputs,), vec_size=vec_size)


class _Inputs(NamedTuple):
    """Arrays in global memory: x [rows, K], and the norm's [K], of a LayerNorm, an RMSNorm (no shift) or none."""

    x: Ref
    norm_scale: Ref | None
    norm_shift: Ref | None


class _Results(NamedTuple):
    """Arrays in global memory: int8 [rows, K] and float32 [rows]."""

    q: Ref
    scale: Ref


def quantize(
    x: jax.Array, norm_scale: jax.Array | None = None, norm_shift: jax.Array | None = None, *, eps: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Quantise rows, or what the norm makes of them. Arguments as of `api`. Raises UnsupportedError.

    One warpgroup per row; the row stays in registers between finding its maximum and rounding.
    """
    inputs = x.shape[-1]
    if inputs % _THREADS or inputs > _MAX_INPUTS:
        raise UnsupportedError(f"a row must be a multiple of {_THREADS}, at most {_MAX_INPUTS} inputs, got {inputs}")
    plan = Plan(rows=x.size // inputs, inputs=inputs, eps=eps)
    results = _Results(
        q=gmem(jax.ShapeDtypeStruct((plan.rows, inputs), jnp.int8)),
        scale=gmem(jax.ShapeDtypeStruct((plan.rows,), jnp.float32)),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[results],
        grid=(plan.rows,),
        grid_names=("row",),
        kernel_name="quantize_rows" if norm_scale is None else "norm_quantize",
    )
    (quantized,) = kernel(_Inputs(gmem(x.reshape(plan.rows, inputs)), gmem(norm_scale), gmem(norm_shift)))
    return quantized.q.reshape(x.shape), quantized.scale.reshape(*x.shape[:-1], 1)


def _kernel(plan: Plan, inputs: _Inputs, results: _Results) -> None:
    """Quantise one row."""
    row = lax.axis_index("row")
    y = _load_floats(plan, inputs.x.at[row])
    if inputs.norm_scale is not None:
        if inputs.norm_shift is not None:
            y -= jnp.sum(y) / plan.inputs
        y *= lax.rsqrt(jnp.sum(y * y) / plan.inputs + plan.eps)
        # Loaded late: a row, the scale and the shift do not fit into registers together.
        y *= _load_floats(plan, inputs.norm_scale)
        if inputs.norm_shift is not None:
            y += _load_floats(plan, inputs.norm_shift)
    scale = jnp.maximum(jnp.max(jnp.abs(y)), 1e-30) / 127.0
    results.q[row] = jnp.round(y / scale).astype(jnp.int8)
    results.scale[row] = scale


def _load_floats(plan: Plan, ref: Ref) -> jax.Array:
    """Load a vector [K] as float32."""
    return load(ref, plan.layout).astype(jnp.float32)
