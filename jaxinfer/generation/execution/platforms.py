"""Every choice that generation makes by platform or mesh."""

import dataclasses

from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.passes import STEP_SECONDS
from jaxinfer.pallas_kernels.attention.api import MAX_DECODE_TOKENS


def buckets_of(config: EngineConfig, platform: str, *, streamed: bool = False, stages: int = 1) -> Buckets:
    """Choose the buckets of a decoder's steps.

    Args:
      platform: "cpu" or "gpu".
      streamed: whether its layers are streamed.
      stages: how many stages its pipeline has; 1: it has none.

    Raises ValueError for a config that the platform cannot run.
    """
    if platform == "gpu" and config.kernels:
        # Chunks of one prompt attend to one another; the kernel for few tokens takes rows of different requests.
        enough = config.chunk_size > MAX_DECODE_TOKENS
        config.check("chunk_size", enough, f"> {MAX_DECODE_TOKENS} with GPU kernels")
    if platform == "cpu":  # attention reads as many pages as a row has, elsewhere as many as the table has
        buckets = Buckets.from_config(config)
    else:  # every step takes as long as reading the weights, so that padding costs little
        buckets = Buckets.from_config(config, max_padding=4.0, short_page_tables=True)
    if streamed:  # fetching takes as long for few rows as for many
        buckets = dataclasses.replace(buckets, decode_rows=buckets.prefill_rows[1:])
    return buckets.for_stages(stages) if stages > 1 else buckets


def step_seconds(platform: str) -> float:
    """The longest time that a decode step of several passes should take on a platform."""
    # The host needs 1 to 2 ms to send a step, and on a CPU it takes them from the cores that compute; prompts take long
    # there, so that a request that comes hardly notices the longer step that it waits for.
    return 4 * STEP_SECONDS if platform == "cpu" else STEP_SECONDS


def shares_memory(platform: str) -> bool:
    """Return whether the device's memory is shared with other processes, so that a cache should not take all of it."""
    return platform == "cpu"
