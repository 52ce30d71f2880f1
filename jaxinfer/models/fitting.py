"""Fit a model to a mesh: the config and the leaves that divide over its devices, with the results of the original.

Sizes that do not divide are padded with zeros: attention heads, the MLP's hidden width, the vocabulary. A KV head
that more devices need than one is copied, and its queries are shared out between the copies. This happens to shapes
before loading and to indices while reading, so that layers and programs know nothing of it.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import AttentionConfig, DecoderConfig, ModelConfig, TransformerConfig, VisionConfig
from jaxinfer.models.files.description import kind_of
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.weights import GROUP, QuantizedFormat
from jaxinfer.sharding import ShardingRules

TOKENS_PER_WORD = 32
"""Tokens in a word of a bitmask of the vocabulary, whose words are divided too."""

SPLIT = ("heads", "mlp", "vocab")
"""The logical axes that are fitted; a leaf has at most one of them."""

Take = np.ndarray
"""int [new size]: for each index of a fitted dimension, the stored index that it has, or -1 for zeros."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitting:
    """A config that divides over a mesh, and how its leaves come from the stored ones.

    Attributes:
      original: the config of the stored model.
      config: the fitted one.
      takes: by linear, norm of heads or embedding ("qkv", "out", "q_norm", "k_norm", "gate_up", "down", "embed",
        "head"), what its split dimension takes; none for what stays as it is.
    """

    original: ModelConfig
    config: ModelConfig
    takes: Mapping[str, Take] = dataclasses.field(default_factory=dict)

    def of_leaf(self, name: str, stored: Leaf) -> tuple[Take | None, ...]:
        """Return the take of each dimension of a stored leaf; None: all. Raises ValueError if int4 groups are split."""
        part = name.split(".")[-2]
        if (take := self.takes.get(part)) is None:
            return (None,) * len(stored.shape)
        size = self.stored_size(part)
        return tuple(
            _in_groups(name, take, size, stored.shape[dim]) if axis in SPLIT else None
            for dim, axis in enumerate(stored.axes)
        )

    def take(self, part: str, array: np.ndarray, dim: int) -> np.ndarray:
        """Return the fitted form of an array on the host whose dimension `dim` is the split one of a linear."""
        take = self.takes.get(part)
        if take is None:
            return array
        shape = [1] * array.ndim
        shape[dim] = -1
        return np.take(array, np.maximum(take, 0), axis=dim) * (take >= 0).reshape(shape).astype(array.dtype)

    def size(self, part: str) -> int:
        """Return the size of the dimension of a linear or embedding that can be split."""
        take = self.takes.get(part)
        return self.stored_size(part) if take is None else len(take)

    def stored_size(self, part: str) -> int:
        """Return the size of the dimension of a linear or embedding that can be split, in the stored model."""
        config = self.original
        assert not isinstance(config, VisionConfig)
        attention = config.attention
        return {
            "qkv": attention.kv_heads * (attention.group + 2) * attention.head_dim,
            "out": attention.q_heads * attention.head_dim,
            "q_norm": attention.q_heads * attention.head_dim,
            "k_norm": attention.kv_heads * attention.head_dim,
            "gate_up": config.mlp.hidden * (2 if config.mlp.gated else 1),
            "down": config.mlp.hidden,
        }.get(part, config.vocab)


def fit(
    config: ModelConfig,
    weights: WeightFormat,
    mesh: Mesh | AbstractMesh | None,
    rules: ShardingRules,
    *,
    stored: QuantizedFormat | None = None,
) -> Fitting:
    """Fit a model to a mesh.

    Args:
      weights: the format on the devices.
      stored: the format on disk; groups of int4 then stay whole.

    Raises ValueError, with the reason and the nearest size that works, for a mesh that it cannot be fitted to.
    """
    if isinstance(config, VisionConfig) and mesh is not None and mesh.size > 1:
        raise ValueError(
            f"mesh {_shape_text(mesh)}: a model of images ({kind_of(config)}) runs on one device; give it no mesh."
        )
    if isinstance(config, DecoderConfig) and config.moe_layers and mesh is not None and mesh.size > 1:
        raise ValueError(
            f"mesh {_shape_text(mesh)}: a mixture of experts is not implemented on several devices; give it no mesh."
        )
    if mesh is None or isinstance(config, VisionConfig):
        return Fitting(original=config, config=config)
    ways = {axis: rules.ways(mesh, axis) for axis in SPLIT}
    try:
        return _fit(config, weights, ways, stored=stored)
    except ValueError as error:
        for fewer in range(max(ways.values()) - 1, 0, -1):
            try:
                _fit(config, weights, {axis: min(n, fewer) for axis, n in ways.items()}, stored=stored)
            except ValueError:
                continue
            raise ValueError(f"mesh {_shape_text(mesh)}: {error} The nearest that works is {fewer} ways.") from error
        raise


def _shape_text(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)


def _fit(
    config: TransformerConfig, weights: WeightFormat, ways: Mapping[str, int], *, stored: QuantizedFormat | None
) -> Fitting:
    takes: dict[str, Take] = {}
    attention, heads = _fit_heads(config.attention, ways["heads"], weights)
    if heads is not None:
        takes |= heads
    hidden = _fit_width(config.mlp.hidden, ways["mlp"], weights)
    if hidden != config.mlp.hidden:
        takes["down"] = _padded(config.mlp.hidden, hidden)
        factor = 2 if config.mlp.gated else 1
        takes["gate_up"] = _padded(factor * config.mlp.hidden, factor * hidden)
    vocab = config.vocab if ways["vocab"] == 1 else _round_up(config.vocab, TOKENS_PER_WORD * ways["vocab"])
    if vocab != config.vocab:
        takes["embed"] = takes["head"] = _padded(config.vocab, vocab)
    fitted = dataclasses.replace(
        config,
        attention=attention,
        mlp=dataclasses.replace(config.mlp, hidden=hidden),
        padded_vocab=None if vocab == config.vocab else vocab,
    )
    fitting = Fitting(original=config, config=fitted, takes=takes)
    if stored == "int4":
        for part in takes.keys() & {"out", "down"}:
            if weights.of_matrix(size := fitting.stored_size(part)) == "int4":
                _in_groups(part, takes[part], size, size // GROUP)
    return fitting


def _fit_heads(
    attention: AttentionConfig, ways: int, weights: WeightFormat
) -> tuple[AttentionConfig, dict[str, Take] | None]:
    """Return the attention whose KV heads divide, with the fewest heads to compute; None if it is the same."""

    def size(copies: int) -> tuple[int, int]:
        group = -(-attention.group // copies)
        kv_heads = _round_up(attention.kv_heads * copies, ways)
        inputs = attention.q_heads * attention.head_dim
        while not _fits(inputs, kv_heads * group * attention.head_dim, ways, weights):
            kv_heads += ways
        return kv_heads, group

    copies = min(range(1, attention.group + 1), key=lambda copies: (size(copies)[0] * (size(copies)[1] + 2), copies))
    kv_heads, group = size(copies)
    if (kv_heads, group) == (attention.kv_heads, attention.group):
        return attention, None
    queries = np.full((kv_heads, group), -1)
    keys = np.full(kv_heads, -1)
    for head in range(attention.kv_heads):
        group_queries = np.arange(attention.group) + head * attention.group
        for copy in range(copies):
            part = group_queries[copy * group : (copy + 1) * group]
            queries[head * copies + copy, : len(part)] = part
            keys[head * copies + copy] = head
    slopes = attention.slopes
    fitted = dataclasses.replace(
        attention,
        kv_heads=kv_heads,
        q_heads=kv_heads * group,
        alibi=tuple(slopes[q] if q >= 0 else 0.0 for q in queries.flat),
        real_kv_heads=None if kv_heads == (real := attention.kv_heads * copies) else real,
        real_q_heads=attention.q_heads,
    )
    width = attention.group + 2  # of a KV head in qkv: its queries, its key, its value
    rows = [
        [*(_row(q, attention) for q in queries[head]), *(k if k < 0 else k * width + width - i for i in (2, 1))]
        for head, k in enumerate(keys)
    ]
    return fitted, {
        "qkv": _features(np.array(rows).reshape(-1), attention.head_dim),
        "out": _features(queries.reshape(-1), attention.head_dim),
        "q_norm": _features(queries.reshape(-1), attention.head_dim),
        "k_norm": _features(keys, attention.head_dim),
    }


def _row(query: int, attention: AttentionConfig) -> int:
    """Return where a query head is in qkv, in units of heads."""
    return -1 if query < 0 else query + 2 * (query // attention.group)


def _features(heads: np.ndarray, head_dim: int) -> Take:
    """Return the features of some heads; -1 stays -1."""
    features = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] < 0, -1, features).reshape(-1)


def _fit_width(size: int, ways: int, weights: WeightFormat) -> int:
    """Return the least width of at least `size` inputs that divides."""
    fitted = _round_up(size, ways)
    while not _fits(size, fitted, ways, weights):
        fitted += ways
    return fitted


def _fits(size: int, fitted: int, ways: int, weights: WeightFormat) -> bool:
    """Return whether a matrix keeps its format with this many inputs, and int4 groups are whole on every device."""
    fmt = weights.of_matrix(size)
    return weights.of_matrix(fitted) == fmt and (fmt != "int4" or fitted // ways % GROUP == 0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(size: int, fitted: int) -> Take:
    return np.concatenate([np.arange(size), np.full(fitted - size, -1)])


def _in_groups(name: str, take: Take, size: int, stored: int) -> Take:
    """Return a take of `size` elements, for a dimension that stores them in `stored` words or groups."""
    if stored == size:
        return take
    groups = take.reshape(-1, GROUP)
    first = groups[:, :1]
    whole = np.where(first < 0, -1, first + np.arange(GROUP))
    if len(take) % GROUP or not np.array_equal(groups, whole) or np.any(first[first >= 0] % GROUP):
        raise ValueError(f"{name}: int4 has one scale for {GROUP} inputs, and devices would share a scale.")
    per_group = stored * GROUP // size
    group = first[:, 0] // GROUP
    words = group[:, None] * per_group + np.arange(per_group)
    return np.where(group[:, None] < 0, -1, words).reshape(-1)
