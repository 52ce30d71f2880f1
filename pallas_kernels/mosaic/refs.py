"""The types of what a kernel's body takes, and what an array or a barrier is declared by.

A kernel has a NamedTuple for its arrays in GMEM and one for its scratch. Outside they hold arrays and declarations, and
`plgpu.kernel` calls the body with the same tuples of refs: `plgpu.kernel(body, scratch_types=[scratch], ...)(inputs)`.
The functions here give either the type that it has in the body.
"""

from collections.abc import Mapping
from typing import Any, cast, overload

import jax
import numpy as np

from jaxinfer.pallas_kernels.mosaic import pl, plgpu

type Index = jax.Array | int
"""A number, known when the kernel is traced or only when it runs."""


class Ref(Any):
    """An array in GMEM or SMEM, or a part of one (`ref.at[...]`); `ref[...]` is its value.

    JAX has no public type for all of them. With Any as a base, type checkers take a Ref where JAX asks for its own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    at: "Mapping[Any, Ref]"
    T: "Ref"


class Barrier(Any):
    """A barrier in SMEM, or several (`barrier.at[i]` is one of them)."""

    at: "Mapping[Any, Barrier]"


@overload
def gmem(array: jax.Array | jax.Ref | jax.ShapeDtypeStruct) -> Ref: ...
@overload
def gmem(array: jax.Array | None) -> Ref | None: ...
def gmem(array: Any) -> Any:
    """The array, for a kernel that takes it or, by its shape and dtype, writes it; None if there is none."""
    return array


def smem(shape: tuple[int, ...], dtype: Any, transforms: tuple[Any, ...] = ()) -> Ref:
    """Declare an array in SMEM. transforms: how it lies there (`layout.swizzled_tiles`)."""
    return cast(Ref, plgpu.SMEM(shape, dtype, transforms=transforms))


def barrier(arrivals: int = 1, count: int | None = None) -> Barrier:
    """Declare a barrier, or `count` of them, each complete after so many arrivals; a TMA copy is one."""
    return cast(Barrier, plgpu.Barrier(num_arrivals=arrivals, num_barriers=() if count is None else count))


def cluster_barrier(axis: str) -> Barrier:
    """Declare a barrier of the thread blocks of a cluster; each of them arrives once (`cluster.meet`)."""
    return cast(Barrier, plgpu.ClusterBarrier(collective_axes=(axis,), num_arrivals=1))


def slice_past_end(size: int, index: jax.Array) -> "pl.Slice":
    """Return a slice from 0 to `size`, which may be past the end of an array that TMA pads with zeros.

    JAX rejects that for a constant start, so it is 0 times `index`, any traced number.
    """
    return pl.ds(pl.multiple_of(index * 0, 128), size)


def copy_zero_filled(source: Ref, target: Ref, full: Barrier) -> None:
    """Begin a copy from GMEM to SMEM that writes zeros for what lies past the end of the array.

    Vectors need it, unless they begin and end at multiples of 16 bytes: at others a plain copy is an illegal
    instruction, which the interpreter does not see (docs/decisions/0031).
    """
    plgpu.copy_gmem_to_smem(source, target, full, oob_mode=plgpu.OOBFillMode.ZEROS)
