"""The leaves that a model has: their names, shapes, dtypes and axes."""

import functools
import json
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints import Leaf
from jaxinfer.checkpoints.manifest import part_name
from jaxinfer.disk_cache import KeptFiles, cache_folder, keys
from jaxinfer.models.config import AttentionConfig, DecoderConfig, DeltaRuleConfig, Mixer, ModelConfig
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import RecurrentState, Window
from jaxinfer.pallas_kernels.weights import STORED_AS, QuantizedFormat

_OF_TOKENS = ("batch", None, "heads")
_AXES = {"conv": (*_OF_TOKENS, None), "state": ("batch", "heads", None, None)}
_WINDOW_AXES = Window._make((("batch",), (*_OF_TOKENS, None), _OF_TOKENS, _OF_TOKENS))
MAX_BYTES = 16 << 20
"""The room for all descriptions on disk together."""


@functools.cache
def canonical_leaves(config: ModelConfig, weights: WeightFormat) -> Mapping[str, Leaf]:
    """The leaves of a model in this format, by name, in the order in which programs take them.

    The model itself says what they are, which takes building it without arrays; so the answer is kept on disk.
    """
    files = KeptFiles(cache_folder() / "leaves", max_bytes=MAX_BYTES)
    name = _key(config, weights)
    if name and (content := files.get(name)):
        return types.MappingProxyType(_read(content))
    from jaxinfer.models import abstract

    leaves = abstract.describe_leaves(abstract.split_model(config, weights)[1])
    if name:
        files.put(name, json.dumps({k: [v.shape, v.dtype, v.axes] for k, v in leaves.items()}).encode())
    return types.MappingProxyType(leaves)


def _key(config: ModelConfig, weights: WeightFormat) -> str | None:
    try:
        return keys.digest({"leaves": keys.describe((config, weights)), **keys.code_key()})
    except keys.NoKeyError:
        return None


def _read(content: bytes) -> dict[str, Leaf]:
    described: dict[str, Any] = json.loads(content)
    return {name: Leaf(tuple(shape), dtype, tuple(axes)) for name, (shape, dtype, axes) in described.items()}


def cache_leaves(config: ModelConfig, weights: WeightFormat, batch: int, context: int) -> dict[str, Leaf]:
    """Return keys and values of `batch` requests of `context` tokens, as leaves; an encoder has none."""
    if not isinstance(config, DecoderConfig):
        return {}

    def pages(attention: AttentionConfig) -> Leaf:
        shape = (batch, context, attention.kv_heads, attention.head_dim)
        return Leaf(shape, weights.dtype.name, ("pages", "page", "kv_heads", "head_dim"))

    return {
        f"{name}.{layer}": pages(config.layer(layer).attention)
        for layer in config.cached_layers
        if config.layer(layer).has_attention
        for name in ("keys", "values")
    }


def state_leaves(config: ModelConfig, weights: WeightFormat, slots: int, *, window: int = 0) -> dict[str, Leaf]:
    """List the recurrent states in so many slots, as leaves; most models have none.

    window: as in `recurrent_shapes`.
    """
    if not isinstance(config, DecoderConfig):
        return {}
    leaves = dict[str, Leaf]()
    for layer in config.state_layers:
        shapes = recurrent_shapes(config.layer(layer).mixer, slots, weights.dtype, window=window)
        described = jax.tree.map(lambda x, axes: Leaf(x.shape, x.dtype.name, axes), shapes, state_axes(shapes))
        for path, leaf in jax.tree_util.tree_leaves_with_path(described):
            leaves[f"{layer}{jax.tree_util.keystr(path)}"] = leaf
    return leaves


def state_axes(shapes: RecurrentState) -> RecurrentState:
    """The logical axes of the arrays of a layer's states: a tuple in place of each."""
    return RecurrentState._make((*_AXES.values(), None if shapes.window is None else _WINDOW_AXES))


def recurrent_shapes(mixer: Mixer, slots: int, dtype: np.dtype, *, window: int = 0) -> RecurrentState:
    """The shapes of a layer's states in so many slots.

    Args:
      dtype: of the layer's inputs.
      window: the most tokens of a pass that may turn out wrong.
    """
    assert isinstance(mixer, DeltaRuleConfig)
    return RecurrentState.shapes(
        slots,
        conv=mixer.conv,
        key_heads=mixer.key_heads,
        value_heads=mixer.value_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        dtype=dtype,
        window=window,
    )


def leaves_of_part(
    config: ModelConfig, weights: WeightFormat, layer: int | None, expert: int | None = None
) -> dict[str, Leaf]:
    """The leaves that belong together, in the order of `canonical_leaves`.

    Args:
      layer: whose they are; None: those of no layer, which are there once.
      expert: which of its experts' they are, each a part of a leaf (`Leaf.parts`); None: those of no expert.
    """
    leaves = {name: leaf for name, leaf in canonical_leaves(config, weights).items() if layer_of(name) == layer}
    if expert is None:
        return {name: leaf for name, leaf in leaves.items() if not leaf.parts}
    return {part_name(name, expert): leaf.part for name, leaf in leaves.items() if leaf.parts}


def layer_of(name: str) -> int | None:
    """The layer that a leaf belongs to; None for embeddings, the head and what else is there once."""
    first, *rest = name.split(".")
    return int(rest[0]) if first == "layers" else None


def scale_name(name: str) -> str:
    """The leaf with the scales of a quantised matrix: `a.weight` -> `a.scale`."""
    return name.rpartition(".")[0] + ".scale"


def quantized_format(dtype: jax.typing.DTypeLike) -> QuantizedFormat | None:
    """The format whose matrices have this dtype; None for a float."""
    return next((name for name, stored in STORED_AS.items() if stored == jnp.dtype(dtype)), None)
