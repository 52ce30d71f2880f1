"""Fit a model to a mesh: the config and the leaves that divide over its devices, with the results of the original.

Sizes that do not divide are padded with zeros: attention heads, the MLP's hidden width, the vocabulary. A KV head
that more devices need than one is copied, and its queries are shared out between the copies. This happens to shapes
before loading and to indices while reading, so that layers and programs know nothing of it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import (
    AttentionConfig,
    ConvolutionalConfig,
    DecoderConfig,
    DeltaRuleConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    TransformerConfig,
    ViTConfig,
    kind_of,
)
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.weights import GROUP, QuantizedFormat
from jaxinfer.sharding import ShardingRules, axes_text

TOKENS_PER_WORD = 32
"""Tokens in a word of a bitmask of the vocabulary, whose words are divided too."""

SPLIT = ("heads", "mlp", "expert_mlp", "vocab")
"""The logical axes that are fitted; a leaf has at most one of them."""

Take = np.ndarray
"""int [new size]: for each index of a fitted dimension, the stored index that it has, or -1 for zeros."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitting:
    """A config that divides over a mesh, and how its leaves come from the stored ones.

    Attributes:
      original: the config of the stored model.
      config: the fitted one.
      takes: what split dimensions take, none for those that stay as they are, by the names of linears, norms and
        embeddings ("layers.0.attention.qkv", "layers.0.mlp.experts.down", "head").
    """

    original: ModelConfig
    config: ModelConfig
    takes: Mapping[str, Take] = dataclasses.field(default_factory=dict)

    def of_leaf(self, name: str, stored: Leaf) -> tuple[Take | None, ...]:
        """The take of each dimension of a stored leaf; None: all. Raises ValueError if int4 groups are split."""
        linear = name.rpartition(".")[0]
        if (take := self.takes.get(linear)) is None:
            return (None,) * len(stored.shape)
        size = self.stored_size(linear)
        return tuple(
            _in_groups(name, take, size, stored.shape[dim]) if axis in SPLIT else None
            for dim, axis in enumerate(stored.axes)
        )

    def take(self, linear: str, array: np.ndarray, dim: int) -> np.ndarray:
        """Fit an array on the host; `dim` is the dimension in which its linear is split."""
        if (take := self.takes.get(linear)) is None:
            return array
        shape = [1] * array.ndim
        shape[dim] = -1
        return np.take(array, np.maximum(take, 0), axis=dim) * (take >= 0).reshape(shape).astype(array.dtype)

    def size(self, linear: str) -> int:
        """The size of the dimension of a linear or embedding that can be split."""
        take = self.takes.get(linear)
        return self.stored_size(linear) if take is None else len(take)

    def stored_size(self, linear: str) -> int:
        """The size of the dimension of a linear or embedding that can be split, in the stored model."""
        config = self.original
        assert not isinstance(config, ConvolutionalConfig)
        match linear.split("."):
            case "layers", layer, "mlp", *within, part:
                mlp = config.layer(int(layer)).mlp
                mlp = mlp.shared if within == ["shared"] else mlp
                assert mlp is not None
                return mlp.hidden * (2 if part == "gate_up" and mlp.gated else 1)
            case "layers", layer, "attention", part:
                attention = config.layer(int(layer)).attention
                kv_heads = attention.kv_heads
                fused = kv_heads * (attention.group + attention.kv_parts)
                heads = {"qkv": fused, "k_norm": kv_heads}.get(part, attention.q_heads)
                return heads * attention.head_dim
            case "layers", layer, "delta_rule", part:
                mixer = config.layer(int(layer)).mixer
                assert isinstance(mixer, DeltaRuleConfig)
                sizes = {"qkv": mixer.key_heads * mixer.features, "steps": 2 * mixer.value_heads}
                return sizes.get(part, mixer.outputs)
            case "attention_pooling", "mlp", part:
                assert isinstance(config, ViTConfig)
                return config.mlp.hidden * (2 if part == "gate_up" and config.mlp.gated else 1)
        assert not isinstance(config, ViTConfig)
        return config.vocab


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
    if mesh is None:
        return Fitting(original=config, config=config)
    if isinstance(config, ConvolutionalConfig):
        if mesh.size > rules.lanes(mesh):
            raise ValueError(
                f"mesh {axes_text(mesh)}: a convolutional network ({kind_of(config)}) has all its weights on every "
                "device; use MeshConfig(data=N) alone, by which each device takes a part of a batch."
            )
        return Fitting(original=config, config=config)
    if isinstance(config, DecoderConfig):
        _check_experts(config, mesh, rules)
    ways = {axis: rules.ways(mesh, axis) for axis in SPLIT}
    try:
        return _fit(config, weights, ways, stored=stored)
    except ValueError as error:
        for fewer in range(max(ways.values()) - 1, 0, -1):
            try:
                _fit(config, weights, {axis: min(n, fewer) for axis, n in ways.items()}, stored=stored)
            except ValueError:
                continue
            raise ValueError(f"mesh {axes_text(mesh)}: {error} The nearest that works is {fewer} ways.") from error
        raise


def _check_experts(config: DecoderConfig, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> None:
    """Raise ValueError unless the experts of every layer divide over the devices: none is padded.

    Also for a rule of their exchange where there are none.
    """
    if rules.exchange != "cheapest" and not config.moe_layers:
        raise ValueError(
            f"ShardingRules.exchange={rules.exchange!r} is for a mixture of experts, and this model is dense; leave it "
            "out."
        )
    ways = rules.ways(mesh, "experts")
    for layer in config.moe_layers:
        moe = config.layer(layer).mlp.moe
        if moe is not None and (experts := moe.router.experts) % ways:
            over = " x ".join(name for name in rules.mesh_axes("experts") if mesh.shape.get(name, 1) > 1)
            nearest = next(n for n in range(min(ways, experts), 0, -1) if experts % n == 0)
            raise ValueError(
                f"mesh {axes_text(mesh)}: the {experts} experts of layer {layer} do not divide over {over} = {ways} "
                f"devices. The nearest that works is {nearest}; or keep all experts on every device by "
                "ShardingRules(experts=None)."
            )


def _fit(
    config: TransformerConfig | ViTConfig,
    weights: WeightFormat,
    ways: Mapping[str, int],
    *,
    stored: QuantizedFormat | None,
) -> Fitting:
    takes, heads_of = dict[str, Take](), functools.cache(_fit_heads)  # kinds of layers share their arrays

    def fit_layer(kind: LayerConfig) -> LayerConfig:
        mixer = kind.mixer
        if isinstance(mixer, AttentionConfig):
            mixer, _ = heads_of(mixer, ways["heads"], weights)
        elif isinstance(mixer, DeltaRuleConfig):
            _check_delta_rule(mixer, ways["heads"], weights)
        return dataclasses.replace(kind, mixer=mixer, mlp=_fit_mlp(kind.mlp, ways, weights))

    fitted = config.map_layers(fit_layer)
    for layer in range(config.layers):
        if not config.layer(layer).has_attention:
            continue
        _, heads = heads_of(config.layer(layer).attention, ways["heads"], weights)
        takes |= {f"layers.{layer}.attention.{part}": take for part, take in heads.items()}
    takes |= _fit_mlps(config, ways, weights)
    if not isinstance(config, ViTConfig) and ways["vocab"] > 1:
        vocab = _round_up(config.vocab, TOKENS_PER_WORD * ways["vocab"])
        if vocab != config.vocab:
            takes |= dict.fromkeys(("embed", "head", "layer_inputs.table"), _padded(config.vocab, vocab))
            assert not isinstance(fitted, ViTConfig)
            fitted = dataclasses.replace(fitted, padded_vocab=vocab)
    fitting = Fitting(original=config, config=fitted, takes=takes)
    if stored == "int4":
        for linear, take in takes.items():
            grouped = linear.rpartition(".")[2] in ("out", "down")
            if grouped and weights.of_matrix(size := fitting.stored_size(linear)) == "int4":
                _in_groups(linear, take, size, size // GROUP)
    return fitting


def _fit_mlp(mlp: MlpConfig, ways: Mapping[str, int], weights: WeightFormat) -> MlpConfig:
    """Fit an MLP, or a mixture of experts, whose widths divide."""
    if mlp.moe is None:
        return dataclasses.replace(mlp, hidden=_fit_width(mlp.hidden, ways["mlp"], weights))
    moe, hidden = mlp.moe, _fit_width(mlp.hidden, ways["expert_mlp"], weights)
    if moe.shared_hidden is not None:
        moe = dataclasses.replace(moe, shared_hidden=_fit_width(moe.shared_hidden, ways["mlp"], weights))
    return dataclasses.replace(mlp, hidden=hidden, moe=moe)


def _fit_mlps(config: TransformerConfig | ViTConfig, ways: Mapping[str, int], weights: WeightFormat) -> dict[str, Take]:
    """Return what the matrices of MLPs take that are not as wide as their layer's MLP is stored."""
    takes = dict[str, Take]()
    shared = functools.cache(_padded)  # by layers that are alike
    mlps = {f"layers.{layer}.mlp": config.layer(layer).mlp for layer in range(config.layers)}
    if isinstance(config, ViTConfig) and config.pooling_heads:
        mlps["attention_pooling.mlp"] = config.mlp
    for name, stored in mlps.items():
        fitted = _fit_mlp(stored, ways, weights)
        pairs = {name if stored.moe is None else f"{name}.experts": (stored, fitted)}
        if stored.shared is not None and fitted.shared is not None:
            pairs[f"{name}.shared"] = stored.shared, fitted.shared
        for linear, (old, new) in pairs.items():
            if old.hidden != new.hidden:
                factor = 2 if old.gated else 1
                takes[f"{linear}.gate_up"] = shared(factor * old.hidden, factor * new.hidden)
                takes[f"{linear}.down"] = shared(old.hidden, new.hidden)
    return takes


def _fit_heads(attention: AttentionConfig, ways: int, weights: WeightFormat) -> tuple[AttentionConfig, dict[str, Take]]:
    """Fit the attention whose KV heads divide, with the fewest heads to compute, and what its parts take."""

    inputs, sizes = attention.q_heads * attention.head_dim, []
    for copies in range(1, attention.group + 1):
        group = -(-attention.group // copies)
        kv_heads, width = _round_up(attention.kv_heads * copies, ways), group * attention.head_dim
        if fitted_inputs := _least_that_fits(inputs, kv_heads * width, ways * width, ways, weights):
            kv_heads = fitted_inputs // width
            sizes.append((kv_heads * (group + 2), copies, kv_heads, group))
    if not sizes:
        raise ValueError(_never_fits("attention.out", inputs))
    _, copies, kv_heads, group = min(sizes)
    if (kv_heads, group) == (attention.kv_heads, attention.group):
        return attention, {}
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
    by_query = _features(queries.reshape(-1), attention.head_dim)
    parts = attention.kv_parts
    width = attention.group + parts  # of a KV head in qkv: its queries, its key, its value
    rows = [
        [
            *(_row(q, attention) for q in queries[head]),
            *(k if k < 0 else k * width + width - i for i in range(parts, 0, -1)),
        ]
        for head, k in enumerate(keys)
    ]
    return fitted, {
        "qkv": _features(np.array(rows).reshape(-1), attention.head_dim),
        "gate": by_query,
        "out": by_query,
        "q_norm": by_query,
        "k_norm": _features(keys, attention.head_dim),
    }


def _check_delta_rule(mixer: DeltaRuleConfig, ways: int, weights: WeightFormat) -> None:
    """Raise ValueError unless the key heads divide, with whole groups of int4: none is padded."""
    if mixer.key_heads % ways:
        raise ValueError(f"the {mixer.key_heads} key heads of a delta rule do not divide over {ways} devices.")
    if not _fits(mixer.outputs, mixer.outputs, ways, weights):
        raise ValueError(_never_fits("delta_rule.out", mixer.outputs))


def _row(query: int, attention: AttentionConfig) -> int:
    """Return where a query head is in qkv, in units of heads."""
    return -1 if query < 0 else query + attention.kv_parts * (query // attention.group)


def _features(heads: np.ndarray, head_dim: int) -> Take:
    """The features of some heads; -1 stays -1."""
    features = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] < 0, -1, features).reshape(-1)


def _fit_width(size: int, ways: int, weights: WeightFormat) -> int:
    """The least width of at least `size` inputs that divides."""
    fitted = _least_that_fits(size, _round_up(size, ways), ways, ways, weights)
    if fitted is None:
        raise ValueError(_never_fits("mlp.down", size))
    return fitted


def _least_that_fits(size: int, start: int, step: int, ways: int, weights: WeightFormat) -> int | None:
    """The least of start, start + step, ... inputs that `_fits`; after GROUP of them it repeats itself."""
    return next((n for n in range(start, start + GROUP * step, step) if _fits(size, n, ways, weights)), None)


def _never_fits(linear: str, size: int) -> str:
    return f"{linear} is int8 for want of whole groups of {GROUP} among {size} inputs, and what divides has whole ones."


def _fits(size: int, fitted: int, ways: int, weights: WeightFormat) -> bool:
    """Return whether a matrix keeps its format with this many inputs, and int4 groups are whole on every device."""
    fmt = weights.of_matrix(size)
    return weights.of_matrix(fitted) == fmt and (fmt != "int4" or fitted // ways % GROUP == 0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(size: int, fitted: int) -> Take:
    return np.concatenate([np.arange(size), np.full(fitted - size, -1)])


def _in_groups(name: str, take: Take, size: int, stored: int) -> Take:
    """A take of `size` elements, for a dimension that stores them in `stored` words or groups."""
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
