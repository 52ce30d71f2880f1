"""Where weights and the KV cache are if not in a device's memory, and what comes back of prompts that come again."""

from typing import Literal, NamedTuple

from jaxinfer.sharding.planner.hardware import Device, Ways

SLICES = 3
"""Slices of a layer's cache on a device at a time, if the cache of streamed layers is on the host."""
BOTH_ENDS = 0.9
"""A prompt comes from both ends if that takes at most this share of the time of the better single way."""

Tier = Literal["device", "host", "disk"]


def rate(device: Device, ways: Ways, tier: Tier) -> float:
    """The bytes a second that each device gets from a tier, while all of them do: over the host's links."""
    return device.host_link if tier == "host" else min(device.host_link, disk_rate(device, ways))


def disk_rate(device: Device, ways: Ways) -> float:
    """The bytes a second that the host gets for each device from the disks of its node, which devices share."""
    return device.disk / min(ways.size, device.node)


class Restored(NamedTuple):
    """The part that a tier gives back of the tokens of a prompt that it keeps.

    Attributes:
      share: of these tokens; the others are computed.
      wait: seconds until all are there.
      read: seconds that a disk is busy.
      write: seconds by which steps are longer.
    """

    share: float = 0.0
    wait: float = 0.0
    read: float = 0.0
    write: float = 0.0


def restore(*, compute: float, read: float, write: float) -> Restored:
    """Choose what comes back, as jaxinfer's engine does: all, nothing, or the last tokens while the first are computed.

    The third is CacheFlow's way (arXiv:2604.25080): reading and computing take equally long.

    Args:
      compute, read, write: seconds of all these tokens: to compute them, to read them from a disk, and to copy them to
        the devices, for which steps stop.

    >>> restore(compute=4.0, read=0.0, write=1.0)
    Restored(share=1.0, wait=1.0, read=0.0, write=1.0)
    >>> restore(compute=3.0, read=3.0, write=0.0)
    Restored(share=0.5, wait=1.5, read=1.5, write=0.0)
    """
    single = min(compute, read + write)
    meet = compute / (compute + read)
    if (both := meet * (read + write)) <= BOTH_ENDS * single:
        return Restored(meet, both, meet * read, meet * write)
    return Restored() if compute <= read + write else Restored(1.0, single, read, write)
