"""How one family's tensors become our leaves: the parts that every family file is written with.

Pure: numpy arrays and dictionaries in, the same out; no file is opened here. `Source` says how one of our leaves is
made from their tensors, `plan` checks a whole checkpoint against the sources before any tensor is read. Leaves have
the canonical layout: weights [outputs, inputs], like `torch.nn.Linear`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.models.config import AttentionConfig, EncoderConfig, ModelConfig

Shape = tuple[int, ...]
_LISTED = 12
"""The most tensors whose names an error gives: experts may be hundreds."""


@dataclasses.dataclass(frozen=True)
class Source:
    """How one leaf is made.

    Attributes:
      names: the tensors it needs.
      shapes: their shapes.
      combine: makes the leaf from the tensors, in the order of `names`.
      index: which matrix of its tensors it is made of, where each has one for every expert; None: of whole tensors.
      instead: of another layout; a checkpoint with tensors of that has no others in place of them.
      joined: whether `combine` joins the tensors' rows first. They may then be divided in any way: transformers saves a
        tensor that it had joined in equal parts.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    combine: Callable[..., np.ndarray]
    index: int | None = None
    instead: "Source | None" = None
    joined: bool = False

    def shapes_among(self, available: Mapping[str, Shape]) -> tuple[Shape, ...]:
        """The shapes that its tensors must have in a checkpoint with these shapes, by the names of its own."""
        given = tuple(tuple(available.get(name, ())) for name in self.names)

        def whole(shapes: tuple[Shape, ...]) -> tuple[int, set[Shape]]:
            return sum(shape[0] for shape in shapes if shape), {shape[1:] for shape in shapes}

        return given if self.joined and whole(given) == whole(self.shapes) else self.shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models: how its configs are read and where its tensors go.

    Attributes:
      model_types: the values of `model_type` in `config.json`.
      config: makes our config from a `config.json`, or if the family has none from the shapes of its tensors, by names
        without prefix; a ValueError names what is not implemented.
      sources: makes, from our config, leaf name -> Source, with tensor names written without prefix.
      prefixes: what a checkpoint may put before tensor names; the first that fits is removed. A state dict's is found
        by `recognise`.
      ignored: a pattern of tensor names (without prefix) that a checkpoint may contain and we do not need.
      left_out: a pattern of tensor names of parts that are not implemented, such as what sees images.
      renamed: other spellings and what replaces them, anywhere in a name.
      mark: of a family without `config.json`, the tensor (without prefix) that it is recognised by.
      published: the names of its models, as people know them.
      image_processor: of a family of images, the one that its `preprocessor_config.json` is of if it does not say.
    """

    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], ModelConfig]
    sources: Callable[..., dict[str, Source]]  # of this family's own config class
    prefixes: tuple[str, ...] = ()
    ignored: str = ""
    left_out: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    mark: str = ""
    published: tuple[str, ...] = ()
    image_processor: str = ""

    def plain_name(self, name: str) -> str:
        """A tensor's name as `sources` writes it."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        for old, new in self.renamed:
            name = name.replace(old, new)
        return name


def plan(
    family: Family, config: ModelConfig, available: Mapping[str, Shape], *, described_by: str = "config.json"
) -> dict[str, Source]:
    """Return the Source of each leaf, with tensor names as in the checkpoint.

    Args:
      family: of the checkpoint.
      config: of the model.
      available: name -> shape of every tensor in the checkpoint.
      described_by: where the config comes from, for errors.
    Raises ValueError, which lists all missing, unexpected and mis-shaped tensors.
    """
    plain_shapes = {family.plain_name(name): tuple(shape) for name, shape in available.items()}
    sources = _in_its_layout(family.sources(config), set(plain_shapes))
    sources |= _dense(config) if isinstance(config, EncoderConfig) else {}
    needed = {
        name: shape
        for source in sources.values()
        for name, shape in zip(source.names, source.shapes_among(plain_shapes), strict=True)
    }
    actual: dict[str, str] = {}  # plain name -> the checkpoint's
    unexpected = []
    for name in sorted(available):
        plain = family.plain_name(name)
        if plain in needed and plain not in actual:
            actual[plain] = name
        elif not re.fullmatch(f"{family.ignored}|{family.left_out}", plain):
            unexpected.append(name)
    missing = [name for name in needed if name not in actual]
    misshaped = [
        f"{name} is {list(available[name])}, the config needs {list(needed[plain])}"
        for plain, name in actual.items()
        if tuple(available[name]) != needed[plain]
    ]
    problems = [
        f"{len(names)} {kind}: {listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped))
        if names
    ]
    if problems:
        fit, remedy = f" with this {described_by}", f"{described_by} and the weights of the same checkpoint"
        if family.mark:
            fit, remedy = "", "the whole state dict of a model that is implemented"
        raise ValueError(
            f"The tensors do not fit a {family.model_types[0]}{fit} ({'; '.join(problems)}). Use {remedy}."
        )
    return {
        leaf: dataclasses.replace(source, names=tuple(actual[name] for name in source.names))
        for leaf, source in sources.items()
    }


def _dense(config: EncoderConfig) -> dict[str, Source]:
    """The sources of the layers behind an encoder's pooling, whose tensors have the names of the leaves."""
    sources: dict[str, Source] = {}
    inputs = config.embed
    for i, dense in enumerate(config.dense):
        name = f"dense.{i}.linear"
        sources |= linear(name, (name,), (dense.outputs,), inputs, bias=dense.bias)
        inputs = dense.outputs
    return sources


def _in_its_layout(sources: dict[str, Source], names: set[str]) -> dict[str, Source]:
    """The sources of the layout that a checkpoint with these tensors (plain names) is in."""
    if not any(source.instead is not None and names.issuperset(source.instead.names) for source in sources.values()):
        return sources
    return {leaf: source if source.instead is None else source.instead for leaf, source in sources.items()}


def listed(names: Sequence[str]) -> str:
    """Return the first names for an error, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


# Sources: one leaf, or the leaves of one layer.


def only(tensor: np.ndarray) -> np.ndarray:
    """Return the tensor unchanged."""
    return tensor


def table(leaf: str, name: str, rows: int, width: int) -> dict[str, Source]:
    """An embedding."""
    return {leaf: Source((name,), ((rows, width),), only)}


def norm(leaf: str, name: str, size: int, *, bias: bool = False, combine: Callable = only) -> dict[str, Source]:
    """A LayerNorm (with bias) or RMSNorm."""
    sources = {f"{leaf}.scale": Source((f"{name}.weight",), ((size,),), combine)}
    if bias:
        sources[f"{leaf}.bias"] = Source((f"{name}.bias",), ((size,),), only)
    return sources


def constant(leaf: str, value: float, size: int) -> dict[str, Source]:
    """A vector of one value that no tensor has: the scale 1 or the bias 0 of a norm without it."""
    return {leaf: Source((), (), lambda: np.full(size, value, np.float32))}


def linear(
    leaf: str,
    names: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    *,
    bias: bool,
    combine: Callable[..., np.ndarray] = only,
    conv1d: bool = False,
) -> dict[str, Source]:
    """One linear of ours from one or several projections of theirs.

    Args:
      leaf: our linear.
      names: their projections.
      outputs: the number of outputs of each.
      inputs: the number of inputs, the same for all.
      bias: whether they have biases.
      combine: joins or reorders their output rows; the same for weights and biases.
      conv1d: they store [inputs, outputs] (GPT-2).
    """
    shapes: tuple[Shape, ...] = tuple((rows, inputs) for rows in outputs)
    join_weights = combine
    if conv1d:
        shapes = tuple((inputs, rows) for rows in outputs)

        def join_weights(*weights: np.ndarray) -> np.ndarray:
            return combine(*(weight.T for weight in weights))

    sources = {f"{leaf}.weight": Source(tuple(f"{name}.weight" for name in names), shapes, join_weights)}
    if bias:
        rows = tuple((n,) for n in outputs)
        sources[f"{leaf}.bias"] = Source(tuple(f"{name}.bias" for name in names), rows, combine)
    return sources


# Rows: the order of a linear's outputs. All of these take weights [rows, inputs] and biases [rows].


def qkv_rows(attention: AttentionConfig) -> tuple[int, int, int]:
    """The number of outputs of the projections of queries, keys and values."""
    kv = attention.kv_heads * attention.head_dim
    return attention.q_heads * attention.head_dim, kv, kv


def by_kv_head(attention: AttentionConfig) -> Callable[..., np.ndarray]:
    """A function that joins q, k and v by KV head: the queries of its group, its key, its value; or q and k, or q."""

    def combine(*parts: np.ndarray) -> np.ndarray:
        heads = [part.reshape(attention.kv_heads, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(heads, axis=1).reshape(-1, *parts[0].shape[1:])

    return combine


def by_kv_head_from_pairs(attention: AttentionConfig, rotary_dim: int) -> Callable[..., np.ndarray]:
    """Return `by_kv_head` for q and k whose rotated features are paired as neighbours.

    Their products stay as they are, since both are permuted alike.
    """

    def combine(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k = (pairs_to_halves(rows, attention.head_dim, rotary_dim) for rows in (q, k))
        return by_kv_head(attention)(q, k, v)

    return combine


def by_kv_head_from_fused(attention: AttentionConfig) -> Callable[..., np.ndarray]:
    """Return `by_kv_head` for one projection whose rows are all queries, all keys, all values."""
    q, k, _ = qkv_rows(attention)

    def combine(fused: np.ndarray) -> np.ndarray:
        return by_kv_head(attention)(*np.split(fused, (q, q + k)))

    return combine


def alternate(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Alternate gate and up rows: gate 0, up 0, gate 1, ..."""
    return np.stack((gate, up), axis=1).reshape(-1, *gate.shape[1:])


def alternate_from_fused(fused: np.ndarray) -> np.ndarray:
    """Alternate the rows of one projection that has all gates, then all ups."""
    return alternate(*np.split(fused, 2))


def pairs_to_halves(rows: np.ndarray, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Reorder the rotated rows of each head, from pairs (2i, 2i + 1) to our pairs (i, i + rotary_dim / 2)."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    order = np.r_[0:rotary_dim:2, 1:rotary_dim:2, rotary_dim:head_dim]
    return heads[:, order].reshape(rows.shape)
