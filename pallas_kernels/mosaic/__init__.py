"""Pallas and Mosaic, JAX's language for GPU kernels, imported when the first kernel is traced.

That takes half as long as importing JAX, and most processes trace none: those without a GPU, and those whose
executables are on disk. Kernels use these names as the modules they stand for, but only inside functions.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax._src.pallas.mosaic_gpu import primitives
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic.gpu import fragmented_array, utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir.dialects import llvm
else:

    class _Module(ModuleType):
        """A module that is imported when it is first asked for something."""

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self.__name__), attribute)

    pl = _Module("jax.experimental.pallas")
    plgpu = _Module("jax.experimental.pallas.mosaic_gpu")
    fragmented_array = _Module("jax.experimental.mosaic.gpu.fragmented_array")
    utils = _Module("jax.experimental.mosaic.gpu.utils")
    primitives = _Module("jax._src.pallas.mosaic_gpu.primitives")  # there is no public way to ask for one
    llvm = _Module("jaxlib.mlir.dialects.llvm")

__all__ = ["fragmented_array", "inline_ptx", "llvm", "pl", "plgpu", "primitives", "utils"]


def inline_ptx(code: str) -> None:
    """Insert a PTX instruction without operands."""
    from jax._src.pallas.mosaic_gpu import helpers  # no public way to fence

    helpers.inline_ptx(code)
