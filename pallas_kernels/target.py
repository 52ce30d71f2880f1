"""The device that operations are traced for, and what it can do."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator

import jax

_RESERVED_BYTES = 1024  # of shared memory, by CUDA for each thread block


class UnsupportedError(NotImplementedError):
    """An implementation does not support these arguments; the message names the constraint and the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that only some GPUs have.

    Attributes:
      first, last: the compute capabilities from and to which GPUs have it; `last` is None if it is in all later ones.
      missing: why an implementation that needs it does not run elsewhere.
    """

    first: tuple[int, int]
    last: tuple[int, int] | None = None
    missing: str

    def is_in(self, capability: tuple[int, int]) -> bool:
        """Return whether GPUs of this compute capability have the feature."""
        return self.first <= capability and (self.last is None or capability <= self.last)


FEATURES = {
    # Asynchronous copies by TMA, barriers and clusters: PTX ISA, cp.async.bulk.tensor, mbarrier, barrier.cluster.
    "mosaic": Feature(first=(9, 0), missing="kernels need sm_90 or newer"),
    # A feature of sm_90a, which no other GPU has: PTX ISA, target notes of wgmma.mma_async.
    "wgmma": Feature(first=(9, 0), last=(9, 0), missing="it needs wgmma, which only sm_90 has"),
    # Its attention exists from sm_80 on; here it stands beside kernels that do not.
    "cudnn": Feature(first=(9, 0), missing="cuDNN is used from sm_90 on"),
}
"""Every feature that an implementation may need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """A kind of GPU.

    Attributes:
      name: JAX's device kind ("NVIDIA H200").
      capability: the compute capability, (major, minor).
      sms: streaming multiprocessors.
      shared_bytes: the most shared memory that a thread block can have.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int

    def has(self, feature: str) -> bool:
        """Return whether this GPU has one of `FEATURES`."""
        return FEATURES[feature].is_in(self.capability)

    def shared_bytes_of(self, blocks: int) -> int:
        """The most shared memory of each thread block, if an SM is to run `blocks` of them at once.

        An SM has as much as its largest block and what CUDA reserves for it (CUDA programming guide, table 31).
        """
        return (self.shared_bytes + _RESERVED_BYTES) // blocks - _RESERVED_BYTES


INTERPRETED = GPU(name="interpreter", capability=(9, 0), sms=132, shared_bytes=227 << 10)
"""The GPU that the interpreter stands for: an H100."""

_target = jax.make_user_context(None)
_interpreting = False


def targeting(gpu: GPU) -> contextlib.AbstractContextManager[None]:
    """Choose implementations and tile sizes for this GPU, which need not be here, in what this thread traces inside."""
    return _target(gpu)


def target_gpu() -> GPU:
    """The GPU that a kernel is traced for: that of `targeting`, or else this machine's first."""
    gpu = gpu_or_none()
    assert gpu is not None, "kernels are traced for a GPU: here, by `targeting`, or `interpreted`"
    return gpu


def gpu_or_none() -> GPU | None:
    """The NVIDIA GPU that a program traced now is for, or None: it is for another device."""
    return _target.value or (INTERPRETED if _interpreting else _local_gpu())


def is_ahead_of_time() -> bool:
    """Return whether a program traced now is for the GPU of `targeting` alone."""
    return _target.value is not None


def interpreting() -> bool:
    """Return whether kernels are traced for the interpreter, which needs a different form of a few operations."""
    return _interpreting


@contextlib.contextmanager
def set_interpreting() -> Iterator[None]:
    """Trace kernels for the interpreter, in every thread (`mosaic.interpreter.interpreted`)."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def require_shared_bytes(needed: int) -> None:
    """Raise UnsupportedError if a thread block cannot have this much shared memory."""
    if needed > (available := target_gpu().shared_bytes):
        raise UnsupportedError(f"a thread block needs {needed} bytes of shared memory and has {available}")


@functools.cache
def _local_gpu() -> GPU | None:
    """The first NVIDIA GPU of this machine."""
    device = jax.devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))  # AMD: "gfx942"
    if capability is None:
        return None
    return GPU(
        name=device.device_kind,
        capability=(int(capability[1]), int(capability[2])),
        sms=device.core_count,
        shared_bytes=device.shared_memory_per_block_optin,
    )
