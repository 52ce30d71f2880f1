"""The memory that a model takes in each format of its weights, as a table."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxinfer.models import ModelConfig, WeightFormat
    from jaxinfer.models.files.description import Description

FORMATS = (("float32", None), ("bfloat16", None), (None, "int8"), (None, "int4"), (None, "fp8"))
"""dtype and quantisation; None: the dtype that is given."""
DEVICES = {"in 24 GB": 24 * 10**9, "in 80 GB": 80 * 10**9}
"""Memory of common GPUs."""
TOKENS = 1000


def print_formats(description: "Description", dtype: str | None) -> None:
    """Print a row for each format: bytes of weights and cache, and the tokens that fit into a memory.

    description: the model. dtype: that quantised models compute in; None: as stored.
    """
    from rich.filesize import decimal

    from jaxinfer.cli.display import show, table
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.devices import device_total_bytes, devices_of

    generates = isinstance(description.config, DecoderConfig)
    total = device_total_bytes(devices_of(None)[0])
    memories = DEVICES | ({} if total is None else {f"here, in\n{decimal(total)}": total})
    columns = (f"cache of\n{TOKENS:,} tokens",) if generates else ()
    shown = table("format", "weights", *columns, *memories, figures=len(memories) + len(columns) + 1)
    for name, weights in _formats(description, dtype).items():
        size, cache = memory_of(description.config, weights)
        fits = (_fits(size, cache, memory) for memory in memories.values())
        shown.add_row(name, decimal(size), *([decimal(cache)] if generates else []), *fits)
    show(shown)
    if generates:
        typer.echo("Last columns: tokens of KV cache that fit in addition to the weights.\n")


def _formats(description: "Description", dtype: str | None) -> "Mapping[str, WeightFormat]":
    from jaxinfer.models.config import ConvolutionalConfig
    from jaxinfer.models.files.description import weight_format

    formats = {}
    for own_dtype, quantize in FORMATS:
        if quantize and isinstance(description.config, ConvolutionalConfig):
            continue
        if description.quantization not in (None, quantize):
            continue  # a quantised model has no other format
        weights = weight_format(description, dtype=own_dtype or dtype, quantize=quantize)
        formats[f"{quantize}, {weights.dtype}" if quantize else str(weights.dtype)] = weights
    return formats


def memory_of(config: "ModelConfig", weights: "WeightFormat") -> tuple[int, int]:
    """Return the bytes of the weights, and those of the cache for `TOKENS` tokens."""
    from jaxinfer.models.devices import bytes_per_device
    from jaxinfer.models.leaves import cache_leaves, canonical_leaves
    from jaxinfer.sharding import ShardingRules

    leaves = canonical_leaves(config, weights), cache_leaves(config, weights, 1, TOKENS)
    size, cache = (bytes_per_device(part, None, ShardingRules()) for part in leaves)
    return size, cache


def _fits(weights: int, cache: int, memory: int) -> str:
    from jaxinfer.generation.execution.memory import FRACTION

    if weights > memory:
        return "no"
    return f"{int((memory - weights) * FRACTION) * TOKENS // cache:,}" if cache else "yes"
