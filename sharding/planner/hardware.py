"""Devices and what connects them."""

import dataclasses


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

    def crosses_nodes(self, devices: int) -> bool:
        """Return whether so many neighbouring devices are in several nodes."""
        return devices > self.node
