"""Running kernels in Mosaic's interpreter, which also looks for races."""

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels.dispatch import interpreted


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """Interpret the kernels called within; fails if one of them has a race. Call them outside of a cached `jax.jit`."""
    try:
        with interpreted():
            yield
        assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
