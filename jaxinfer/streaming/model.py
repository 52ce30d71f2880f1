"""A model whose layers are streamed to its devices while it runs."""

import dataclasses
import logging
import pathlib

from jax.sharding import Sharding

from jaxinfer.checkpoints.layer_files import LayerFiles
from jaxinfer.checkpoints.stores import DeviceStore, DiskStore, HostStore, LayerStore, TieredStore, to_host
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.progress import long_work
from jaxinfer.serving.heap import map_large_arrays
from jaxinfer.streaming.config import ExpertPlacement, LayerRange, Placement, Tier
from jaxinfer.streaming.layer_folders import experts_of, layer_leaves, open_layer_files, read_leaves

_log = logging.getLogger("jaxinfer.streaming")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StreamedModel(LoadedModel):
    """A model whose `leaves` are only the ones outside layers: embeddings, the head, the last norm.

    Attributes:
      store: the store of its layers, without experts.
      experts: the store of its experts; None: it has none.
    """

    store: LayerStore
    experts: LayerStore | None


def layer_ranges(opened: OpenedModel, placement: Placement) -> tuple[LayerRange, ...]:
    """The layers as a pass runs them."""
    config = opened.transformer
    return placement.ranges(config.layer_kinds, config.moe_layers if isinstance(config, DecoderConfig) else ())


def stream_model(opened: OpenedModel, placement: Placement, layer_files: pathlib.Path | None = None) -> StreamedModel:
    """Read the weights that stay on the devices and in the host's memory; write missing layer files if any are on disk.

    Args:
      layer_files: the folder of the layer files; None: as `open_layer_files` chooses.

    Raises CheckpointError for files that are damaged or cannot be written.
    """
    _log.info("%s", placement)
    map_large_arrays()
    leaves = opened.read(lambda name: layer_of(name) is None, stays=True)
    shardings = {layer: _shardings(opened, layer) for layer in range(opened.transformer.layers)}

    files, aliases = None, opened.platform == "cpu"
    stores: dict[Tier, LayerStore] = {}
    if "disk" in placement.tiers or (placement.experts is not None and placement.experts.tier == "disk"):
        files = open_layer_files(opened, layer_files)
    if "disk" in placement.tiers:
        assert files is not None
        stores["disk"] = DiskStore(files, shardings, aliases=aliases)
    host, device = {}, {}
    with long_work("reading layers", total=len(placement.tiers)) as work:
        for layer, tier in enumerate(placement.tiers):
            if tier == "host":
                host[layer] = [to_host(array) for array in read_leaves(opened, layer_leaves(opened, layer)).values()]
            elif tier == "device":
                device[layer] = list(read_leaves(opened, layer_leaves(opened, layer), stays=True).values())
            work.advance()
    stores["host"], stores["device"] = HostStore(host, shardings), DeviceStore(device)
    store = TieredStore([stores[tier] for tier in placement.tiers])
    experts = None if placement.experts is None else _expert_store(opened, placement.experts, files)
    return StreamedModel(**opened.fields(), leaves=leaves, store=store, experts=experts)


def _shardings(opened: OpenedModel, layer: int, expert: int | None = None) -> list[Sharding]:
    """Return where the leaves of a layer, or of one of its experts, come to the devices."""
    return [shape.sharding for shape in opened.layer_shapes(layer, expert)]


def _expert_store(opened: OpenedModel, placement: ExpertPlacement, files: LayerFiles | None) -> LayerStore:
    """Make the store of the experts: their numbers follow those of the layers."""
    layers, keys = opened.transformer.layers, experts_of(opened.config)
    places = range(layers, layers + len(keys))
    of_layer = {layer: _shardings(opened, layer, 0) for layer in dict(keys)}
    shardings = {place: of_layer[layer] for place, (layer, _) in zip(places, keys, strict=True)}
    if placement.tier == "disk":
        assert files is not None
        store = DiskStore(files, shardings, aliases=opened.platform == "cpu")
        if store.aliases:
            store.staging.reserve(store.largest, placement.slots)
        return store
    experts = {}
    with long_work("reading experts", total=len(keys)) as work:
        for place, key in zip(places, keys, strict=True):
            leaves = read_leaves(opened, layer_leaves(opened, *key), stays=not placement.slots).values()
            experts[place] = [to_host(array) if placement.slots else array for array in leaves]
            work.advance()
    return HostStore(experts, shardings) if placement.slots else DeviceStore(experts)
