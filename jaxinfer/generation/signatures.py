"""Generation's programs by name: the function of each for given sizes, and the shapes of what it takes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.programs import DeviceState, Pieces, Rows, Slots, admit, copy, decode, step
from jaxinfer.generation.sampling import Processors, idle_options, sampling_arrays
from jaxinfer.generation.structured import words
from jaxinfer.models import DecoderConfig, KVPages, LayerAdapters, LowRankStack, WeightFormat

LINEARS = {"qkv": "attention.qkv", "out": "attention.out", "gate_up": "mlp.up", "down": "mlp.down"}
"""The fields of `LayerAdapters` -> their linears in a layer."""


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def slots(count: int, context: int, processors: int) -> Slots:
    """`Slots` of `count` rows."""
    flag = jax.ShapeDtypeStruct((count,), jnp.bool_)
    options = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), sampling_arrays([idle_options(processors)])
    )
    vector = _integers(count)
    return Slots(_integers(count, context), vector, flag, vector, vector, options)  # type: ignore[arg-type]


def device_state(
    config: DecoderConfig, weights: WeightFormat, engine: EngineConfig, *, pages: int, processors: int
) -> DeviceState:
    """The state of an engine with a cache of this many pages."""
    attention = config.attention
    layer = KVPages.shapes(
        pages,
        engine.page_size,
        attention.kv_heads,
        attention.head_dim,
        weights.dtype,
        int8=engine.kv_dtype == "int8",
    )
    return DeviceState([layer] * config.layers, slots(engine.slots + 1, engine.context, processors))


def rows(batch: int, pages: int) -> Rows:
    """`Rows` of a batch whose page tables have `pages` entries."""
    return Rows(_integers(batch), _integers(batch, pages))  # type: ignore[arg-type]


def pieces(count: int, pages: int) -> Pieces:
    """`Pieces`, `count` of them."""
    vector = _integers(count)
    last = jax.ShapeDtypeStruct((count,), jnp.bool_)
    return Pieces(vector, vector, vector, last, _integers(count, pages))  # type: ignore[arg-type]


def mask(count: int, vocab: int) -> jax.ShapeDtypeStruct:
    """The tokens that may be chosen in `count` rows."""
    return jax.ShapeDtypeStruct((count, words(vocab)), np.uint32)


def adapters(shapes: dict[str, tuple], engine: EngineConfig, layers: int, dtype: np.dtype) -> list[LayerAdapters]:
    """Room for the adapters that run together; `shapes` as from `models.adapters.adapter_shapes`."""

    def stack(name: str) -> LowRankStack:
        (rank, inputs), (outputs, _) = shapes[name]
        return LowRankStack(
            jax.ShapeDtypeStruct((engine.max_adapters, rank, inputs), dtype),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((outputs, engine.max_adapters, rank), dtype),  # type: ignore[arg-type]
        )

    return [
        LayerAdapters(**{field: stack(f"layers.{i}.{name}") for field, name in LINEARS.items()}) for i in range(layers)
    ]


OF_MODEL = ("step", "decode")
"""Programs that run the model: they take it and its adapters before the state."""


def program(
    name: str, sizes: Mapping[str, int], engine: EngineConfig, *, vocab: int, processors: Processors = ()
) -> tuple[Callable, tuple[Any, ...]]:
    """A program's function for these sizes, and the shapes of its arguments after the state."""
    batch, pages = sizes.get("batch", 0), sizes.get("pages", 0)
    if name == "admit":
        count = sizes["count"]
        return admit, (_integers(count), slots(count, engine.context, len(processors)))
    if name == "copy":
        return copy, (_integers(sizes["count"]), _integers(sizes["count"]))
    if name == "step":
        count = sizes["pieces"]
        body = functools.partial(step, width=engine.piece_tokens, processors=processors)
        return body, (pieces(count, pages), rows(batch, pages), mask(count + batch, vocab))
    body = functools.partial(
        decode, max_steps=engine.max_decode_steps, max_drafts=sizes["drafts"], processors=processors
    )
    return body, (rows(batch, pages), mask(batch, vocab), _integers(), _integers(batch))
