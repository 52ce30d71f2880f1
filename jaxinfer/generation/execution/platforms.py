"""Every choice that generation makes by platform or mesh."""

import dataclasses

from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.pallas_kernels.attention.api import MAX_DECODE_TOKENS


def buckets_of(config: EngineConfig, platform: str) -> Buckets:
    """The buckets of a decoder on a platform ("cpu", "gpu"). Raises ValueError for what it cannot run."""
    if platform == "gpu" and config.kernels:
        # Chunks of one prompt attend to one another; the kernel for few tokens takes rows of different requests.
        enough = config.chunk_size > MAX_DECODE_TOKENS
        config.check("chunk_size", enough, f"> {MAX_DECODE_TOKENS} with GPU kernels")
    if platform == "cpu":  # attention reads as many pages as there are, elsewhere as many as the table has
        return Buckets.of(config)
    # Every step takes as long as reading the weights, so that padding costs little.
    return Buckets.of(config, max_padding=4.0, short_page_tables=True)


def streamed_buckets(buckets: Buckets) -> Buckets:
    """Those of a decoder whose layers are streamed: fetching takes as long for few rows as for many."""
    return dataclasses.replace(buckets, decode_rows=buckets.prefill_rows[1:])


def sliced_buckets(buckets: Buckets, max_chunks: int | None) -> Buckets:
    """Those of the programs of a streamed layer, through which so many chunks go together; None: all of a step."""
    chunks = tuple(count for count in buckets.chunks if max_chunks is None or count <= max_chunks)
    return dataclasses.replace(buckets, chunks=chunks)


def can_overlap(model: LoadedModel) -> bool:
    """Whether a step may be sent while another one runs."""
    several = model.mesh is not None and model.mesh.size > 1
    # Virtual devices on a CPU deadlock when the collectives of two programs are in flight.
    return not (several and model.platform == "cpu")


def shares_memory(platform: str) -> bool:
    """Whether the device's memory is also that of other processes, so that a cache should not take all of it."""
    return platform == "cpu"
