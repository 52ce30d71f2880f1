"""Clusters of thread blocks that exchange partial results through global memory."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxinfer.pallas_kernels.mosaic import inline_ptx, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import load
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref
from jaxinfer.pallas_kernels.target import UnsupportedError

MAX_CLUSTER = 8
"""Thread blocks of a cluster, at most: what CUDA promises on every GPU that has clusters ("portable")."""


def check_cluster(size: int) -> None:
    """Refuse sizes that a GPU may refuse: Mosaic learns that only at the launch, and then ends the process (`abort` in
    jaxlib/mosaic/gpu/runtime.cc).

    From 1 to MAX_CLUSTER every size is valid, not only powers of two: CUDA asks for nothing else but that the size
    divides the grid, and `plgpu.kernel` multiplies the grid by it. Raises UnsupportedError.
    """
    if not 1 <= size <= MAX_CLUSTER:
        raise UnsupportedError(f"a cluster has 1 to {MAX_CLUSTER} thread blocks, got {size}")


def meet(barrier: Barrier) -> None:
    """Wait for all thread blocks of the cluster, and see what they have written to global memory before.

    Only a few threads of a warpgroup arrive, so what the others have written must come before that: hence the explicit
    barrier, although Mosaic has one after each store of its own (`auto_barriers`). Arrivals order memory only within a
    thread block, hence the fences. All have to wait: arrivals are counted in each one's shared memory, which must still
    exist.
    """
    plgpu.commit_smem()  # a barrier among the threads of the warpgroup
    inline_ptx("fence.acq_rel.cluster;")
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    inline_ptx("fence.acq_rel.cluster;")


def partial_results(partials: Ref, index: Any, layout: Any) -> Iterator[jax.Array]:
    """Load what each thread block has written, `partials[block, *index]`, once the cluster has met.

    The order is always that of the blocks, so that sums of them are deterministic.
    """
    for block in range(partials.shape[0]):
        yield load(partials.at[(block, *index)], layout)
