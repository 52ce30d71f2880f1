"""Running kernels in Mosaic's interpreter with race detection."""

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """Interpret the kernels called inside, and fail if one has a race. Do not call them through a cached `jax.jit`."""
    try:
        with interpreted():
            yield
        assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
