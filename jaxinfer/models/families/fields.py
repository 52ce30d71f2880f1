"""Reading a Hugging Face `config.json` strictly: every error names the field and its value."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from jaxinfer.fields import shown
from jaxinfer.models.config import Activation, PositionKind, PositionsConfig, RopeScaling

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


MAX_SIZE = 2**31 - 1
"""The largest number of anything in a config: tensors of more in one dimension are not known."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """A look at all that the reading of configs refuses, beyond the first.

    Attributes:
      expected: fields of `config.json` -> the one value that is implemented.
      refused: an error for each value that is not.
    """

    expected: dict[str, object] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)


_survey: ContextVar[Survey | None] = ContextVar("survey", default=None)


@contextlib.contextmanager
def surveyed() -> Iterator[Survey]:
    """Collect what is refused in configs that are read inside, which goes on with other values where it can.

    So what is read is a model's only if nothing was refused.
    """
    survey = Survey()
    token = _survey.set(survey)
    try:
        yield survey
    finally:
        _survey.reset(token)


def refuse(message: str) -> None:
    """Raise ValueError, or only note it inside `surveyed`."""
    if (survey := _survey.get()) is None:
        raise ValueError(message)
    if message not in survey.refused:
        survey.refused.append(message)


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a `config.json`. Getters take all spellings of a field; null counts as absent.

    Attributes:
      file: what errors call it.
    """

    values: Mapping[str, object]
    file: str = "config.json"

    def __post_init__(self) -> None:
        self.expect("quantization_config", None, "convert the unquantised checkpoint and pass --quantize int8")
        self.expect("is_encoder_decoder", False)
        self.expect("add_cross_attention", False)

    def expect(self, name: str, supported: object, remedy: str = "choose another checkpoint") -> None:
        """Refuse every value of a field except the implemented one; `remedy` ends the error."""
        value = self.values.get(name)
        if (survey := _survey.get()) is not None and self.file.startswith("config.json"):
            survey.expected[name] = supported
        if value is not None and value != supported:
            refuse(f"{self.file}: {name}={shown(value)} is not implemented, only {supported!r}; {remedy}.")

    def optional(self, kind: type, *names: str) -> Any:
        """A field's value, or None."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is int and abs(value) > MAX_SIZE:
                raise ValueError(f"{self.file}: {name}={shown(value)} must be at most {MAX_SIZE}; correct it.")
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ValueError(f"{self.file}: {name}={shown(value)} must be of type {kind.__name__}; correct it.")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{self.file}: {name}={value!r} must be a finite number; correct it.")
            return value
        return None

    def _get(self, kind: type, names: tuple[str, ...], default: object) -> Any:
        value = self.optional(kind, *names)
        if value is None and default is None:
            raise ValueError(f"{self.file}: {names[0]} is missing; use the checkpoint's original {self.file}.")
        return default if value is None else value

    def colours(self, name: str) -> tuple[float, float, float] | None:
        """A number for each of red, green and blue, or None."""
        value = self.optional(list, name)
        if value is None:
            return None
        if len(value) != 3 or any(type(number) not in (int, float) for number in value):
            raise ValueError(
                f"{self.file}: {name}={shown(value)} must be a number for each of red, green and blue; correct it."
            )
        red, green, blue = map(float, value)
        return red, green, blue

    def side(self, name: str, *, default: int) -> int:
        """Compute the side of a square, given as one number or as two that are equal."""
        value = self.values.get(name)
        if not isinstance(value, list):
            return self.integer(name, default=default, least=1)
        if len(value) != 2 or value[0] != value[1] or type(value[0]) is not int or value[0] < 1:
            raise ValueError(f"{self.file}: {name}={shown(value)} is not implemented, only squares.")
        return value[0]

    def integer(self, *names: str, default: int | None = None, least: int | None = None) -> int:
        """Read an integer of at least `least`; required if there is no default."""
        value = self._get(int, names, default)
        if least is not None and value < least:
            raise ValueError(f"{self.file}: {names[0]}={value} must be >= {least}; correct it.")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None."""
        values = self.optional(list, name)
        if values and any(type(value) is not int for value in values):
            raise ValueError(f"{self.file}: {name}={shown(values)} must be a list of whole numbers; correct it.")
        return None if values is None else tuple(values)

    def positive(self, *names: str, default: float | None = None) -> float:
        """A number above 0; required if there is no default."""
        value = self.number(*names, default=default)
        if value <= 0:
            raise ValueError(f"{self.file}: {names[0]}={value} must be > 0; correct it.")
        return value

    def cap(self, name: str) -> float | None:
        """A number above 0, or None."""
        return None if self.values.get(name) is None else self.positive(name)

    def number(self, *names: str, default: float | None = None) -> float:
        """A number; required if there is no default."""
        return self._get(float, names, default)

    def flag(self, *names: str, default: bool) -> bool:
        """A boolean."""
        return self._get(bool, names, default)

    def activation(self, *names: str, default: str) -> Activation:
        """The MLP's nonlinearity."""
        value = self._get(str, names, default)
        if value not in _ACTIVATIONS:
            refuse(
                f"{self.file}: {names[0]}={shown(value)} is not implemented; known: {', '.join(sorted(_ACTIVATIONS))}."
            )
        return _ACTIVATIONS.get(value, Activation.GELU)

    def head_dim(self, embed: int, heads: int) -> int:
        """The width of one head, in families that derive it from the model's."""
        if min(embed, heads) < 1 or embed % heads:
            raise ValueError(
                f"{self.file}: the hidden size {embed} is not a multiple of the {heads} heads; correct it."
            )
        return embed // heads

    def layer_types(self, default: Sequence[str]) -> list[str]:
        """The kind of attention of each layer, by `layer_types` or, without it, the family's default."""
        kinds = self.per_layer("layer_types", len(default)) or list(default)
        if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
            refuse(f"{self.file}: layer_types contains {unknown}, not implemented; known: {FULL}, {SLIDING}.")
            return list(default)
        return kinds

    def every_nth_full(self, layers: int, *names: str, default: int) -> list[str]:
        """Return kinds of attention of which every n-th is full and the others have a window; n by a field."""
        n = self.integer(*names, default=default, least=1)
        return [SLIDING if (i + 1) % n else FULL for i in range(layers)]

    def per_layer(self, name: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None."""
        values = self.optional(list, name)
        if values is not None and len(values) != layers:
            raise ValueError(f"{self.file}: {name} has {len(values)} entries for {layers} layers; correct it.")
        return values

    def windows(self, window: int | None, default: Sequence[str]) -> list[int | None]:
        """The attention window of each layer, by its kind (`layer_types`)."""
        return [window if kind == SLIDING else None for kind in self.layer_types(default)]

    def rotary(
        self,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        theta_names: tuple[str, ...] = ("rope_theta",),
        fraction: float = 1.0,
        fraction_names: tuple[str, ...] = ("partial_rotary_factor",),
    ) -> PositionsConfig:
        """Return rotary positions, from `rope_parameters` (transformers 5) or the older separate fields."""
        name = self.one_spelling("rope_parameters", "rope_scaling")
        rope = Fields(self.optional(dict, name) or {})
        theta = rope.positive("rope_theta", default=self.positive(*theta_names, default=theta))
        fraction = rope.number("partial_rotary_factor", default=self.number(*fraction_names, default=fraction))
        if not 0 <= fraction <= 1:
            raise ValueError(f"{self.file}: {fraction_names[0]}={fraction} must be in [0, 1]; correct it.")
        proportional = rope.values.get("rope_type") == "proportional"
        return PositionsConfig(
            kind=PositionKind.ROTARY,
            theta=theta,
            rotary_dim=head_dim if proportional else int(head_dim * fraction),
            turning_pairs=int(fraction * head_dim // 2) if proportional else None,
            scaling=self._rope_scaling(name, rope),
        )

    def rotary_by_layer_type(
        self, head_dim: int, *, full_theta: float, sliding_theta: float, sliding_names: tuple[str, ...]
    ) -> dict[str, PositionsConfig]:
        """The rotary positions of full and of sliding attention: `rope_parameters` by kind, or older fields.

        In the older spelling `rope_scaling` is of full attention alone.
        """
        self.one_spelling("rope_parameters", "rope_scaling")
        nested = self.optional(dict, "rope_parameters") or {}
        if nested and not nested.keys() <= {FULL, SLIDING}:
            raise ValueError(
                f"{self.file}: rope_parameters has {sorted(nested)}, but layers of {FULL} and of {SLIDING} have their "
                "own; give it these two."
            )

        def of_kind(kind: str, scaling: object) -> "Fields":
            return Fields(
                {**self.values, "rope_parameters": nested.get(kind), "rope_scaling": None if nested else scaling},
                self.file,
            )

        full, sliding = of_kind(FULL, self.values.get("rope_scaling")), of_kind(SLIDING, None)
        return {
            FULL: full.rotary(head_dim, theta=full_theta),
            SLIDING: sliding.rotary(head_dim, theta=sliding_theta, theta_names=sliding_names),
        }

    def one_spelling(self, new: str, old: str) -> str:
        """Return which of two spellings of a field the config has. Raises ValueError for both if they differ."""
        given = [self.optional(dict, name) for name in (new, old)]
        if all(given) and given[0] != given[1]:
            raise ValueError(f"{self.file}: {new} and {old} differ; put what {old} has into {new}, and remove {old}.")
        return new if given[0] else old

    def _rope_scaling(self, name: str, rope: "Fields") -> RopeScaling | None:
        kind = rope.optional(str, "rope_type", "type") or "default"
        kind = "longrope" if kind == "su" else kind  # as the first Phi-3 wrote it
        if kind not in _ROPE_FIELDS:
            refuse(f"{self.file}: {name}.rope_type={shown(kind)} is not implemented; known: {', '.join(_ROPE_FIELDS)}.")
            return None
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_FIELDS[kind]}
        known.add("max_position_embeddings")  # a copy of the config's that nothing reads
        if unknown := sorted(rope.values.keys() - known):
            refuse(f"{self.file}: {name} contains {unknown}, which {kind} does not have; remove them.")
        if kind == "default" or (kind == "proportional" and "factor" not in rope.values):
            return None
        original = self.optional(int, "original_max_position_embeddings")
        original = original or rope.optional(int, "original_max_position_embeddings")
        original = original or self.integer("max_position_embeddings")
        if kind == "longrope":
            return self._longrope(rope, original)
        if kind == "yarn" and rope.values.get("factor", 0) is None:  # as transformers
            factor = self.integer("max_position_embeddings") / original
        else:
            factor = rope.positive("factor")
        if kind == "dynamic":
            return None  # scales what is longer than max_position_embeddings, which no request may be
        if kind in ("linear", "proportional"):
            return RopeScaling(kind="linear", factor=factor)
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

    def _longrope(self, rope: "Fields", original: int) -> RopeScaling:
        """Return LongRoPE's scaling (arXiv:2402.13753), in an engine of the model's whole context."""
        context = self.integer("max_position_embeddings")
        if original < 2:
            raise ValueError(f"{self.file}: original_max_position_embeddings={original} must be >= 2; correct it.")
        factor = rope.positive("factor", default=context / original)
        given = rope.optional(float, "attention_factor")
        scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeScaling(
            kind="longrope",
            factor=factor,
            original_context=original,
            attention_factor=scaled if given is None else given,
            short_factors=rope.numbers("short_factor"),
            long_factors=rope.numbers("long_factor"),
            longer=context > original,
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers; required."""
        values = self._get(list, (name,), None)
        if any(type(value) not in (int, float) or not value > 0 for value in values):
            raise ValueError(f"{self.file}: {name}={values!r} must be a list of positive numbers; correct it.")
        return tuple(map(float, values))


FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of attention that `layer_types` names."""


_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Compute the factor of cos and sin (arXiv:2309.00071, eq. 22): given, or 0.1 ln(factor) + 1."""
    given = rope.optional(float, "attention_factor")
    if given is not None:
        return given

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = rope.optional(float, "mscale"), rope.optional(float, "mscale_all_dim")
    return temperature(mscale) / temperature(all_dims) if mscale and all_dims else temperature(1.0)
