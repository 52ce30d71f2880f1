"""A model whose layers are brought to its devices while it runs."""

import contextlib
import ctypes
import dataclasses
import logging
import pathlib

from checkpoints.stores import DeviceStore, DiskStore, HostStore, LayerStore, TieredStore, to_host
from jaxinfer.models.leaves import layer_of
from jaxinfer.models.loading import LoadedModel, OpenedModel
from jaxinfer.streaming.config import LayerRange, Placement, Tier
from jaxinfer.streaming.layer_folders import layer_leaves, open_layer_files, read_leaves

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
LARGE_ARRAY = 4 << 20
KEPT_ARRAYS = 16
"""How many freed arrays a heap keeps at its end, of the largest that are not large."""

_log = logging.getLogger("jaxinfer.streaming")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StreamedModel(LoadedModel):
    """A model whose `leaves` are those that are there once: embeddings, the head, the last norm.

    Attributes:
      placement: where its layers are.
      store: the layers.
    """

    placement: Placement
    store: LayerStore

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers as a pass runs them."""
        return self.placement.ranges(self.transformer.layer_kinds)


def stream_model(opened: OpenedModel, placement: Placement, layer_files: pathlib.Path | None = None) -> StreamedModel:
    """Read what stays on the devices and in the host's memory; write layer files if layers are on disk and none are.

    Args:
      layer_files: the folder that they are in; None: the model directory.
    Raises CheckpointError for files that are damaged or cannot be written.
    """
    _log.info("%s", placement)
    map_large_arrays()
    leaves = opened.read(lambda name: layer_of(name) is None)
    shardings = [shape.sharding for shape in opened.layer_shapes(0)]

    stores: dict[Tier, LayerStore] = {}
    if "disk" in placement.tiers:
        files = open_layer_files(opened, layer_files)
        stores["disk"] = DiskStore(files, shardings, aliases=opened.platform == "cpu")
    host, device = {}, {}
    for layer, tier in enumerate(placement.tiers):
        if tier == "host":
            host[layer] = [to_host(array) for array in read_leaves(opened, layer_leaves(opened, layer)).values()]
        elif tier == "device":
            device[layer] = list(read_leaves(opened, layer_leaves(opened, layer)).values())
    stores["host"], stores["device"] = HostStore(host, shardings), DeviceStore(device)
    store = TieredStore([stores[tier] for tier in placement.tiers])
    return StreamedModel(**opened.fields(), leaves=leaves, placement=placement, store=store)


def map_large_arrays(smallest: int = LARGE_ARRAY) -> None:
    """Have glibc give every large array pages of its own, which go back to the system when it is freed.

    Otherwise its heaps, one for each thread that reads or copies, keep half a GiB of what passing layers have left. The
    smaller ones stay in the heaps: each would else be given back when it is freed, and mapped anew in the next pass.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, smallest)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_ARRAYS * smallest)
