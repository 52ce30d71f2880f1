"""What kernels and their tile sizes depend on in a GPU."""

import dataclasses

_RESERVED_BYTES = 1024  # of shared memory, by CUDA for each thread block


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

    @property
    def has_wgmma(self) -> bool:
        """`wgmma` is a feature of sm_90a, which no other GPU has (PTX ISA, target notes of wgmma.mma_async)."""
        return self.capability == (9, 0)

    def shared_bytes_of(self, blocks: int) -> int:
        """The most shared memory of each thread block, if an SM is to run `blocks` of them at once.

        An SM has as much as its largest block and what CUDA reserves for it (CUDA programming guide, table 31).
        """
        return (self.shared_bytes + _RESERVED_BYTES) // blocks - _RESERVED_BYTES
