"""Devices, what connects them, and how many ways a mesh divides them."""

import dataclasses
import math

AXES = ("data", "pipeline", "expert", "tensor")
"""The axes of a mesh, those of neighbouring devices last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device in a node of several, and the links to the others.

    Attributes:
      memory: bytes.
      bandwidth: bytes a second from its memory.
      flops: operations a second in dense 16-bit products.
      flops8: the same in 8-bit products.
      node: devices of a node, which `link` connects.
      link: bytes a second to the other devices of the node, in each direction.
      network: bytes a second to other nodes, in each direction, of each device.
      host_link: bytes a second from the host's memory, of each device while all copy.
      disk: bytes a second from the node's disks, which its devices share.
      host_memory: bytes of the node's host memory.
      disk_bytes: bytes of the node's disks.
      price: dollars an hour; None: unknown.
      source: where the figures come from, and when they were read.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    flops8: float
    node: int
    link: float
    network: float
    host_link: float
    disk: float
    host_memory: float
    disk_bytes: float
    price: float | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ways:
    """How many ways each kind of parallelism splits the devices, as `MeshConfig`.

    Attributes:
      data: lanes with requests of their own, which share the experts of a mixture.
      pipeline: stages.
      expert: parts of each layer; of a mixture, groups of experts.
      tensor: parts of each layer and of each expert.
    """

    data: int = 1
    pipeline: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.pipeline * self.expert * self.tensor

    @property
    def slices(self) -> int:
        """The parts of each layer."""
        return self.expert * self.tensor

    @property
    def groups(self) -> int:
        """The groups among which experts are shared out."""
        return self.data * self.expert

    def apart(self, axis: str) -> int:
        """Return how many devices there are from one to the next along an axis."""
        return math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])

    def __str__(self) -> str:
        """The form of `--mesh`: axes with several devices."""
        axes = ((name, ways) for name, ways in dataclasses.asdict(self).items() if ways > 1)
        return ",".join(f"{name}={ways}" for name, ways in axes) or "data=1"
