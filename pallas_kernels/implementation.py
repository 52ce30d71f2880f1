"""One way to compute an operation, and where it can run."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfer.pallas_kernels.target import FEATURES, UnsupportedError, target_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: among the operation's on a platform: "mosaic", "cudnn", "ffi", "xla", "composed", "reference".
      call: a module-level function of the operation's arguments. Raises UnsupportedError for those that it does not
        take. The results of all implementations of an operation have the same types.
      platform: "cuda", for a kernel that XLA cannot partition, or "cpu"; None: every one.
      needs: names of the `FEATURES` that a GPU must have.
    """

    name: str
    call: Callable[..., Any]
    platform: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def is_kernel(self) -> bool:
        """Whether it is code of ours, which XLA cannot partition, rather than XLA's."""
        return self.platform == "cuda" or self.name == "ffi"

    def check(self) -> None:
        """Raise UnsupportedError if the GPU lacks a feature."""
        for feature in self.needs:
            if not target_gpu().has(feature):
                raise UnsupportedError(FEATURES[feature].missing)


def reference(call: Callable[..., Any], *, platform: str | None = None) -> Implementation:
    """The implementation that defines an operation."""
    return Implementation(name="reference", call=call, platform=platform)


def xla(call: Callable[..., Any], *, platform: str | None = None) -> Implementation:
    """An implementation in plain JAX that suits XLA, on one platform or all."""
    return Implementation(name="xla", call=call, platform=platform)


def composed(call: Callable[..., Any]) -> Implementation:
    """An implementation that calls other operations, which are chosen on their own."""
    return Implementation(name="composed", call=call)


def mosaic(call: Callable[..., Any], *needs: str) -> Implementation:
    """An implementation as Mosaic GPU kernels, which needs these features of a GPU."""
    return Implementation(name="mosaic", call=call, platform="cuda", needs=("mosaic", *needs))


def ffi(call: Callable[..., Any]) -> Implementation:
    """An implementation by a CPU kernel in C++, which runs where a library of them is in use (`cpu/`)."""
    return Implementation(name="ffi", call=call, platform="cpu")
