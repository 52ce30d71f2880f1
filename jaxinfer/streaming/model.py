"""A model whose layers are brought to its devices while it runs."""

import contextlib
import ctypes
import dataclasses
import logging
import pathlib
from collections.abc import Callable

import jax

from checkpoints.layer_files import LayerFiles, write_layers
from checkpoints.stores import DeviceStore, DiskStore, HostStore, LayerStore, TieredStore, to_host
from jaxinfer.disk_cache import keys
from jaxinfer.models.leaves import layer_of
from jaxinfer.models.loading import LoadedModel, OpenedModel
from jaxinfer.streaming.config import LayerRange, Placement, Tier

M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
LARGE_ARRAY = 4 << 20

_log = logging.getLogger("jaxinfer.streaming")

Progress = Callable[[int, int], None]
"""Called with the layers done and their number."""


def _log_progress(done: int, total: int) -> None:
    _log.info("written layer %d of %d", done, total)


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


def stream_model(opened: OpenedModel, placement: Placement) -> StreamedModel:
    """Read what stays on the devices and in the host's memory; write layer files if layers are on disk and none are.

    Raises CheckpointError for files that are damaged or cannot be written.
    """
    _log.info("%s", placement)
    map_large_arrays()
    leaves = opened.read(lambda name: layer_of(name) is None)
    shardings = [shape.sharding for shape in opened.layer_shapes(0)]

    stores: dict[Tier, LayerStore] = {}
    if "disk" in placement.tiers:
        files = LayerFiles(write_layer_files(opened))
        stores["disk"] = DiskStore(files, shardings, aliases=opened.platform == "cpu")
    host, device = {}, {}
    for layer, tier in enumerate(placement.tiers):
        if tier == "host":
            host[layer] = [to_host(array) for array in _read_layer(opened, layer).values()]
        elif tier == "device":
            device[layer] = list(_read_layer(opened, layer).values())
    stores["host"], stores["device"] = HostStore(host, shardings), DeviceStore(device)
    store = TieredStore([stores[tier] for tier in placement.tiers])
    return StreamedModel(**opened.fields(), leaves=leaves, placement=placement, store=store)


def map_large_arrays(smallest: int = LARGE_ARRAY) -> None:
    """Have glibc give every large array pages of its own, which go back to the system when it is freed.

    Otherwise its heaps, one for each thread that reads or copies, keep half a GiB of what passing layers have left.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, smallest)


def write_layer_files(opened: OpenedModel, *, progress: Progress = _log_progress) -> pathlib.Path:
    """The folder with the layers as the devices take them, in the model directory; written if it is not there."""
    folder = layer_folder(opened)
    write_layers(
        folder,
        opened.transformer.layers,
        lambda layer: _read_layer(opened, layer),
        total_bytes=sum(leaf.bytes for name, leaf in opened.shapes.items() if layer_of(name) is not None),
        progress=progress,
    )
    return folder


def layer_folder(opened: OpenedModel) -> pathlib.Path:
    """Where the layer files of a model are, in this format and divided so: another format has another folder."""
    key = {
        "files": {name: file.sha256 for name, file in opened.manifest.files.items()},
        "weights": str(opened.weights),
        "config": str(opened.config),
        "mesh": None if opened.mesh is None else dict(opened.mesh.shape),
        "rules": str(opened.rules) if opened.mesh is not None else None,
    }
    return opened.folder.resolve() / f"layers-{keys.digest(key)[:16]}"


def _read_layer(opened: OpenedModel, layer: int) -> dict[str, jax.Array]:
    """The leaves of a layer, divided as they will come to the devices."""
    leaves = opened.read(lambda name: layer_of(name) == layer)
    shapes = opened.layer_shapes(layer)
    return {name: jax.device_put(x, shape.sharding) for (name, x), shape in zip(leaves.items(), shapes, strict=True)}
