"""How one family's Hugging Face config and tensors become ours: what every family file is written with.

Pure: numpy arrays and dictionaries in, the same out; no file is opened here. `Fields` reads a `config.json`
strictly, `Source` says how one of our leaves is made from their tensors, `plan` checks a whole checkpoint against
that before anything is read. Leaves have the canonical layout: kernels [outputs, inputs], like `torch.nn.Linear`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.models.config import Activation, AttentionConfig, ModelConfig, PositionKind, PositionsConfig, RopeScaling

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """How one leaf is made: the tensors it needs, their shapes, and the function that joins them, in that order."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    combine: Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models: how its configs are read and where its tensors go.

    Attributes:
      model_types: the values of `model_type` in `config.json`.
      config: from `config.json` to ours; a ValueError names what is not implemented.
      sources: our dotted leaf name -> its Source, with their names written without prefix.
      prefixes: what a checkpoint may put before those names; the first that fits is removed.
      ignored: a pattern of names (without prefix) that a checkpoint may hold and we do not need.
      renamed: other spellings, replaced wherever they occur in a name.
    """

    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, object]], ModelConfig]
    sources: Callable[..., dict[str, Source]]  # of this family's own config class
    prefixes: tuple[str, ...] = ()
    ignored: str = ""
    renamed: tuple[tuple[str, str], ...] = ()

    def plain_name(self, name: str) -> str:
        """A tensor's name as `sources` writes it."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        for old, new in self.renamed:
            name = name.replace(old, new)
        return name


def plan(family: Family, config: ModelConfig, available: Mapping[str, Shape]) -> dict[str, Source]:
    """Each leaf's Source with the checkpoint's own names in it.

    Args:
      available: name -> shape of every tensor in the checkpoint.
    Raises: one ValueError that lists all missing, unexpected and mis-shaped tensors.
    """
    wanted = family.sources(config)
    needed = {name: shape for s in wanted.values() for name, shape in zip(s.names, s.shapes, strict=True)}
    actual: dict[str, str] = {}  # plain name -> the checkpoint's
    unexpected = []
    for name in sorted(available):
        plain = family.plain_name(name)
        if plain in needed and plain not in actual:
            actual[plain] = name
        elif not re.fullmatch(family.ignored, plain):
            unexpected.append(name)
    missing = [name for name in needed if name not in actual]
    misshaped = [
        f"{name} is {list(available[name])}, the config needs {list(needed[plain])}"
        for plain, name in actual.items()
        if tuple(available[name]) != needed[plain]
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped))
        if names
    ]
    if problems:
        raise ValueError(
            f"The tensors do not fit a {family.model_types[0]} with this config.json ({'; '.join(problems)}). "
            "Take config.json and the weights from the same checkpoint."
        )
    return {
        leaf: dataclasses.replace(source, names=tuple(actual[name] for name in source.names))
        for leaf, source in wanted.items()
    }


# Sources: one leaf, or the leaves of one layer.


def only(tensor: np.ndarray) -> np.ndarray:
    """The tensor as it is."""
    return tensor


def table(leaf: str, name: str, rows: int, width: int) -> dict[str, Source]:
    """An embedding."""
    return {leaf: Source((name,), ((rows, width),), only)}


def norm(leaf: str, name: str, size: int, *, bias: bool = False, combine: Callable = only) -> dict[str, Source]:
    """A LayerNorm (with bias) or RMSNorm."""
    found = {f"{leaf}.scale": Source((f"{name}.weight",), ((size,),), combine)}
    if bias:
        found[f"{leaf}.bias"] = Source((f"{name}.bias",), ((size,),), only)
    return found


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
    """One projection of ours from one or several of theirs.

    Args:
      names: their layers; outputs: how many outputs each has.
      combine: reorders or joins their output rows; the same for kernels and biases.
      conv1d: they store [inputs, outputs] (GPT-2).
    """
    shapes: tuple[Shape, ...] = tuple((rows, inputs) for rows in outputs)
    join_kernels = combine
    if conv1d:
        shapes = tuple((inputs, rows) for rows in outputs)

        def join_kernels(*kernels: np.ndarray) -> np.ndarray:
            return combine(*(kernel.T for kernel in kernels))

    found = {f"{leaf}.kernel": Source(tuple(f"{name}.weight" for name in names), shapes, join_kernels)}
    if bias:
        rows = tuple((n,) for n in outputs)
        found[f"{leaf}.bias"] = Source(tuple(f"{name}.bias" for name in names), rows, combine)
    return found


# Rows: the order of a projection's outputs. All of these take kernels [rows, inputs] and biases [rows].


def qkv_rows(attention: AttentionConfig) -> tuple[int, int, int]:
    """How many outputs the projections of queries, keys and values have."""
    kv = attention.kv_heads * attention.head_dim
    return attention.q_heads * attention.head_dim, kv, kv


def by_kv_head(attention: AttentionConfig) -> Callable[..., np.ndarray]:
    """Joins q, k and v by KV head: its group's queries, its key, its value."""

    def combine(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        heads = [part.reshape(attention.kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
        return np.concatenate(heads, axis=1).reshape(-1, *q.shape[1:])

    return combine


def by_kv_head_from_fused(attention: AttentionConfig) -> Callable[..., np.ndarray]:
    """The same from one projection whose rows are all queries, all keys, all values."""
    q, k, _ = qkv_rows(attention)

    def combine(fused: np.ndarray) -> np.ndarray:
        return by_kv_head(attention)(*np.split(fused, (q, q + k)))

    return combine


def alternate(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Gate and up rows in turn: gate 0, up 0, gate 1, ..."""
    return np.stack((gate, up), axis=1).reshape(-1, *gate.shape[1:])


def alternate_from_fused(fused: np.ndarray) -> np.ndarray:
    """The same from one projection whose rows are all of gate, then all of up."""
    return alternate(*np.split(fused, 2))


def pairs_to_halves(rows: np.ndarray, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Reorders each head's rotated rows, neighbours (2i, 2i + 1) to our pairs (i, i + rotary_dim / 2)."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    order = np.r_[0:rotary_dim:2, 1:rotary_dim:2, rotary_dim:head_dim]
    return heads[:, order].reshape(rows.shape)


# Reading config.json.

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


@dataclasses.dataclass(frozen=True)
class Fields:
    """A `config.json` being read. Getters take a field's spellings; null means absent; errors name the field."""

    values: Mapping[str, object]

    def __post_init__(self) -> None:
        self.expect("quantization_config", None, "convert the unquantised checkpoint and pass --quantize int8")
        self.expect("is_encoder_decoder", False)
        self.expect("add_cross_attention", False)

    def expect(self, name: str, supported: object, remedy: str = "choose another checkpoint") -> None:
        """Refuse every value of a field but the one that is implemented."""
        value = self.values.get(name)
        if value is not None and value != supported:
            raise ValueError(f"config.json: {name}={value!r} is not implemented, only {supported!r}; {remedy}.")

    def optional(self, kind: type, *names: str) -> Any:
        """A field's value, or None."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ValueError(f"config.json: {name}={value!r} must be of type {kind.__name__}; correct it.")
            return value
        return None

    def _get(self, kind: type, names: tuple[str, ...], default: object) -> Any:
        value = self.optional(kind, *names)
        if value is None and default is None:
            raise ValueError(f"config.json: {names[0]} is missing; take the checkpoint's original config.json.")
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> int:
        """A whole number; without default it must be there."""
        return self._get(int, names, default)

    def number(self, *names: str, default: float | None = None) -> float:
        """A number; without default it must be there."""
        return self._get(float, names, default)

    def flag(self, *names: str, default: bool) -> bool:
        """true or false."""
        return self._get(bool, names, default)

    def activation(self, *names: str, default: str) -> Activation:
        """The MLP's nonlinearity."""
        value = self._get(str, names, default)
        if value not in _ACTIVATIONS:
            raise ValueError(
                f"config.json: {names[0]}={value!r} is not implemented; known: {', '.join(sorted(_ACTIVATIONS))}."
            )
        return _ACTIVATIONS[value]

    def head_dim(self, embed: int, heads: int) -> int:
        """The width of one head where the family derives it from the model's."""
        if embed % heads:
            raise ValueError(
                f"config.json: the hidden size {embed} is not a multiple of the {heads} heads; correct it."
            )
        return embed // heads

    def windows(self, window: int | None, default: Sequence[str]) -> tuple[int | None, ...]:
        """Each layer's attention window, from `layer_types` or the family's kind for each layer."""
        kinds = self.optional(list, "layer_types") or default
        known = {"full_attention": None, "sliding_attention": window}
        if unknown := sorted({str(kind) for kind in kinds} - known.keys()):
            raise ValueError(f"config.json: layer_types holds {unknown}, not implemented; known: {', '.join(known)}.")
        if len(kinds) != len(default):
            raise ValueError(
                f"config.json: layer_types has {len(kinds)} entries for {len(default)} layers; correct it."
            )
        windows = tuple(known[kind] for kind in kinds)
        return windows[:1] if len(set(windows)) == 1 else windows

    def rotary(
        self,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        theta_names: tuple[str, ...] = ("rope_theta",),
        fraction: float = 1.0,
        fraction_names: tuple[str, ...] = ("partial_rotary_factor",),
    ) -> PositionsConfig:
        """Rotary positions, from `rope_parameters` (transformers 5) or the older separate fields."""
        name = next((n for n in ("rope_parameters", "rope_scaling") if self.values.get(n)), "rope_scaling")
        rope = Fields(self.optional(dict, name) or {})
        theta = rope.number("rope_theta", default=self.number(*theta_names, default=theta))
        fraction = rope.number("partial_rotary_factor", default=self.number(*fraction_names, default=fraction))
        return PositionsConfig(
            kind=PositionKind.ROTARY,
            theta=theta,
            rotary_dim=int(head_dim * fraction),
            scaling=self._rope_scaling(name, rope),
        )

    def _rope_scaling(self, name: str, rope: "Fields") -> RopeScaling | None:
        kind = rope.optional(str, "rope_type", "type") or "default"
        if kind not in _ROPE_FIELDS:
            raise ValueError(
                f"config.json: {name}.rope_type={kind!r} is not implemented; known: {', '.join(_ROPE_FIELDS)}."
            )
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_FIELDS[kind]}
        if unknown := sorted(rope.values.keys() - known):
            raise ValueError(f"config.json: {name} holds {unknown}, which {kind} does not know; remove them.")
        if kind == "default":
            return None
        factor = rope.number("factor")
        if kind == "linear":
            return RopeScaling(kind=kind, factor=factor)
        original = rope.optional(int, "original_max_position_embeddings")
        if original is None:
            original = self.integer("original_max_position_embeddings", "max_position_embeddings")
        if kind == "llama3":
            return RopeScaling(
                kind=kind,
                factor=factor,
                original_context=original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        rope.expect("truncate", True)
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context=original,
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
        )


_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """What multiplies cos and sin (arXiv:2309.00071, eq. 22): given, or 0.1 ln(factor) + 1."""
    given = rope.optional(float, "attention_factor")
    if given is not None:
        return given

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = rope.optional(float, "mscale"), rope.optional(float, "mscale_all_dim")
    return temperature(mscale) / temperature(all_dims) if mscale and all_dims else temperature(1.0)
