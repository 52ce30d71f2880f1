"""A model whose layers are streamed to its devices while it runs."""

import dataclasses
import logging
import pathlib

from jaxinfer.checkpoints.stores import DeviceStore, DiskStore, HostStore, LayerStore, TieredStore, to_host
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.progress import long_work
from jaxinfer.serving.heap import map_large_arrays
from jaxinfer.streaming.config import LayerRange, Placement, Tier
from jaxinfer.streaming.layer_folders import layer_leaves, open_layer_files, read_leaves

_log = logging.getLogger("jaxinfer.streaming")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StreamedModel(LoadedModel):
    """A model whose `leaves` are only the ones outside layers: embeddings, the head, the last norm.

    Attributes:
      placement: the place of its layers.
      store: the store of its layers.
    """

    placement: Placement
    store: LayerStore

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers as a pass runs them."""
        return self.placement.ranges(self.transformer.layer_kinds)


def stream_model(opened: OpenedModel, placement: Placement, layer_files: pathlib.Path | None = None) -> StreamedModel:
    """Read the weights that stay on the devices and in the host's memory; write missing layer files if any are on disk.

    Args:
      layer_files: the folder of the layer files; None: the model directory.

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
    with long_work("reading layers", total=len(placement.tiers)) as work:
        for layer, tier in enumerate(placement.tiers):
            if tier == "host":
                host[layer] = [to_host(array) for array in read_leaves(opened, layer_leaves(opened, layer)).values()]
            elif tier == "device":
                device[layer] = list(read_leaves(opened, layer_leaves(opened, layer)).values())
            work.advance()
    stores["host"], stores["device"] = HostStore(host, shardings), DeviceStore(device)
    store = TieredStore([stores[tier] for tier in placement.tiers])
    return StreamedModel(**opened.fields(), leaves=leaves, placement=placement, store=store)
