"""Every choice that generation makes by platform or mesh."""

import dataclasses

from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.scheduler import STEP_SECONDS
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.pallas_kernels.attention.api import MAX_DECODE_TOKENS


def buckets_of(config: EngineConfig, platform: str) -> Buckets:
    """A decoder's buckets on a platform ("cpu", "gpu"). Raises ValueError for a config it cannot run."""
    if platform == "gpu" and config.kernels:
        # Chunks of one prompt attend to one another; the kernel for few tokens takes rows of different requests.
        enough = config.chunk_size > MAX_DECODE_TOKENS
        config.check("chunk_size", enough, f"> {MAX_DECODE_TOKENS} with GPU kernels")
    if platform == "cpu":  # attention reads as many pages as a row has, elsewhere as many as the table has
        return Buckets.from_config(config)
    # Every step takes as long as reading the weights, so that padding costs little.
    return Buckets.from_config(config, max_padding=4.0, short_page_tables=True)


def streamed_buckets(buckets: Buckets) -> Buckets:
    """The buckets of a decoder with streamed layers: fetching takes as long for few rows as for many."""
    return dataclasses.replace(buckets, decode_rows=buckets.prefill_rows[1:])


def sliced_buckets(buckets: Buckets, max_chunks: int | None) -> Buckets:
    """The buckets of a streamed layer's programs, which take `max_chunks` at once; None: all of a step."""
    chunks = tuple(count for count in buckets.chunks if max_chunks is None or count <= max_chunks)
    return dataclasses.replace(buckets, chunks=chunks)


def step_seconds(platform: str) -> float:
    """The longest time that a decode step of several passes should take on a platform."""
    # The host needs 1 to 2 ms to send a step, and on a CPU it takes them from the cores that compute; prompts take long
    # there, so that a request that comes hardly notices the longer step that it waits for.
    return 4 * STEP_SECONDS if platform == "cpu" else STEP_SECONDS


def can_overlap(model: LoadedModel) -> bool:
    """Return whether a step may be sent while another one runs."""
    several = model.mesh is not None and model.mesh.size > 1
    # Virtual devices on a CPU deadlock when the collectives of two programs are in flight.
    return not (several and model.platform == "cpu")


def shares_memory(platform: str) -> bool:
    """Return whether the device's memory is shared with other processes, so that a cache should not take all of it."""
    return platform == "cpu"
