"""Where each layer finds its keys and values while the layers of a pass come one after the other.

`ResidentCaches` are on the devices. `OffloadedCaches` are in the host's memory (KV offload: DeepSpeed Inference,
IV-C2): each layer runs on slices of the rows, whose pages come to the devices before, while its weights stay (Sheng et
al. 2023, arXiv:2303.06865, section 4.1). So a layer is read once for more rows than the devices have pages for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxinfer.checkpoints.host_memory import aligned_buffer
from jaxinfer.generation.execution.base import DevicePrograms, send_to_host
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import zeros
from jaxinfer.generation.execution.programs.slice_pages import PutPages, TakePages, slice_sizes
from jaxinfer.generation.execution.slices import SlicePages
from jaxinfer.models import Cache, KVPages
from jaxinfer.sizes import round_up
from jaxinfer.streaming.config import LayerRange


class LayerCaches(Protocol):
    """The caches of all layers, in a pass."""

    def take(self, layers: LayerRange, pages: SlicePages | None) -> list[Cache]:
        """The caches that a program takes for these layers. pages: those of its rows; None: all are there."""
        ...

    def give(self, layers: LayerRange, pages: SlicePages | None, caches: list[Cache]) -> Any:
        """Take caches that a program has written to; returns arrays that are there when the layers have run."""
        ...

    def finish(self) -> int:
        """End a pass; returns the bytes of keys and values that came to the devices in it."""
        ...


class ResidentCaches:
    """The caches of all layers, on the devices.

    Args:
      caches: those of the model, which are replaced.
      places: the place of each layer's cache among them.
    """

    def __init__(self, caches: list[Cache], places: Sequence[int]):
        self._caches, self._places = caches, places

    def take(self, layers: LayerRange, pages: SlicePages | None) -> list[Cache]:
        """The caches that these layers use."""
        return [self._caches[place] for place in dict.fromkeys(self._places[layers.layers])]

    def give(self, layers: LayerRange, pages: SlicePages | None, caches: list[Cache]) -> Any:
        """Keep the caches; of these layers, the first is there when all have run."""
        for place, cache in zip(dict.fromkeys(self._places[layers.layers]), caches, strict=True):
            self._caches[place] = cache
        return caches[0][0]

    def finish(self) -> int:
        """Do nothing, since nothing moves; returns 0."""
        return 0


class _Written(NamedTuple):
    """Pages that a slice has written, on their way to the host.

    Attributes:
      layer: their layer.
      pages: int32 [N], which they are.
      content: their content on the devices, perhaps with padding after it.
    """

    layer: int
    pages: np.ndarray
    content: KVPages


class _HostPages:
    """Pages of one layer in the host's memory.

    Args:
      count: how many.
      shapes: those of pages.

    Attributes:
      arrays: the pages as programs take them.
      rows: uint8 [count, ...] for each array, as numpy copies them fast whatever their dtype.
    """

    def __init__(self, count: int, shapes: KVPages):
        def make(x: Any) -> np.ndarray:
            page = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            size = page.size * page.dtype.itemsize
            return aligned_buffer(count * size).view(x.dtype).reshape(count, *page.shape)

        self.arrays: KVPages = jax.tree.map(make, shapes)
        self.rows = [_bytes_of(x) for x in jax.tree.leaves(self.arrays)]


class OffloadedCaches:
    """The caches of all layers in the host's memory, of which a slice of one layer is on the devices at a time.

    While a slice computes, the pages of the next one are gathered on the host. What it has written comes to the host
    after the next one was sent, or before if that needs it.

    Args:
      layout: their shapes.
      programs: those of `programs.slice_pages`, among others.
    """

    def __init__(self, layout: DeviceLayout, programs: DevicePrograms[Any]):
        self._layout, self._programs = layout, programs
        self._on_host = layout.platform == "cpu"
        self._sizes = slice_sizes(layout.slice_pages)
        self._empty = programs.compile(zeros.spec(layout.caches[0]), zeros.Zeros())
        self._cache: KVPages | None = None  # on the devices, for the slice that computes
        self._layers: list[_HostPages] = []
        self._written: _Written | None = None
        # One is filled while the program that takes the other may run.
        self._blocks = [_HostPages(layout.slice_pages, layout.layer_pages(0, layout.slice_pages)) for _ in range(2)]
        self._moved = 0

    def restart(self) -> None:
        """Make all pages empty; nothing may be on its way."""
        self._written, self._layers = None, []
        for array in jax.tree.leaves(self._cache):
            array.delete()
        layout = self._layout
        self._layers = [_HostPages(layout.num_pages, x) for x in layout.caches if isinstance(x, KVPages)]
        self._cache = self._empty()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages of all layers, all read before any is written. int32 [R]; a target out of range is dropped."""
        known = target < self._layout.num_pages
        for layer in self._layers:
            for rows in layer.rows:
                rows[target[known]] = rows[source[known]]

    def take(self, layers: LayerRange, pages: SlicePages | None) -> list[Cache]:
        """Bring a slice's pages of a layer to the devices; returns the cache that its program takes."""
        assert pages is not None
        written = self._written
        if written is not None and written.layer == layers.first and np.isin(pages.pages, written.pages).any():
            self._store()
        self._blocks.reverse()
        block, used = self._blocks[0], len(pages.pages)
        for rows, target in zip(self._layers[layers.first].rows, block.rows, strict=True):
            np.take(rows, pages.pages, axis=0, out=target[:used], mode="clip")  # "raise" would copy twice
            self._moved += used * rows.shape[1]
        count = round_up(used, self._sizes)
        given = jax.tree.map(lambda x: x[:count], block.arrays)
        return [self._programs.run(PutPages(count=count), self._cache, given)]

    def give(self, layers: LayerRange, pages: SlicePages | None, caches: list[Cache]) -> Any:
        """Have what a slice has written come to the host; returns that, on the devices."""
        assert pages is not None
        (cache,) = caches
        assert isinstance(cache, KVPages)
        self._cache = cache
        places = np.zeros(round_up(len(pages.written), self._sizes), np.int32)
        places[: len(pages.written)] = pages.written
        content: KVPages = self._programs.run(TakePages(count=len(places)), self._cache, places)
        if not self._on_host:
            send_to_host([content])
        self._store()
        self._written = _Written(layers.first, pages.pages[pages.written], content)
        return content

    def finish(self) -> int:
        """Wait until all that was written is on the host; returns the bytes that came from there."""
        self._store()
        moved, self._moved = self._moved, 0
        return moved

    def _store(self) -> None:
        """Wait for what a slice has written, and put it to its layer on the host."""
        if self._written is None:
            return
        layer, pages, content = self._written
        for rows, x in zip(self._layers[layer].rows, jax.tree.leaves(content), strict=True):
            rows[pages] = _bytes_of(np.asarray(x))[: len(pages)]
        self._written = None


def _bytes_of(pages: np.ndarray) -> np.ndarray:
    """The bytes of pages of one layer, uint8 [N, ...], in the same memory."""
    return pages.reshape(len(pages), -1).view(np.uint8)
