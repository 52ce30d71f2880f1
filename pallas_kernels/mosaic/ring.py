"""The ring of pipeline stages in SMEM: TMA copies fill some while the kernel computes with another."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Index

type _Fetch = Callable[[Index, Index], None]
"""fetch(tile, stage) begins the copies of a tile into a stage."""


class Ring(NamedTuple):
    """Tiles `start` to `stop`, which pass through the stages one after the other."""

    stages: int
    start: Index
    stop: Index
    in_use: int = 0  # stages before a tile's that an asynchronous wgmma may still read when they would be refilled

    def stage(self, tile: Index) -> jax.Array:
        """The pipeline stage of a tile."""
        return lax.rem(tile - self.start, self.stages)

    def fill(self, fetch: _Fetch) -> None:
        """Begin the copies of the first tiles."""
        count = self.stages - self.in_use
        if isinstance(self.start, int) and isinstance(self.stop, int):
            for tile in range(self.start, min(self.start + count, self.stop)):
                fetch(tile, tile - self.start)
            return
        pl.loop(self.start, jnp.minimum(self.start + count, self.stop))(lambda tile: fetch(tile, tile - self.start))

    def refill(self, tile: Index, fetch: _Fetch, *, commit: bool = False) -> None:
        """Begin the copies of the next tile for the stage that is free once `tile` has been computed with.

        All warps must have read that stage before: Mosaic begins a copy with a barrier of the warpgroup
        (`auto_barriers`), and `commit` adds another.
        """
        following = tile + (self.stages - self.in_use)
        stage = self.stage(following if self.in_use else tile)

        @pl.when(following < self.stop)
        def _() -> None:
            if commit:
                plgpu.commit_smem()
            fetch(following, stage)

    def release(self, tile: Index, empty: Barrier) -> None:
        """Tell the producer that the tile's stage is empty, if there is another tile for it."""
        pl.when(tile + self.stages < self.stop)(lambda: plgpu.barrier_arrive(empty))

    def wait_until_empty(self, tile: Index, empty: Barrier) -> None:
        """Wait, as the producer, until the consumers have released the tile's stage; the first tiles find it empty."""
        pl.when(tile - self.start >= self.stages)(lambda: plgpu.barrier_wait(empty))
