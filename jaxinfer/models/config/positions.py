"""How a model learns the position of a token."""

import dataclasses
import enum
import math


class PositionKind(enum.StrEnum):
    """How the attention of a layer learns the position of a token."""

    ROTARY = "rotary"  # queries and keys rotated by their position (RoPE, arXiv:2104.09864)
    ALIBI = "alibi"  # a bias on the scores, linear in the distance (arXiv:2108.12409)
    NONE = "none"  # by the causal mask only (NoPE, arXiv:2305.19466), or by a table that the model adds to embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling that stretches rotary positions beyond the trained context."""

    kind: str  # linear: divide every frequency; llama3: divide the low ones, blend in between; yarn: arXiv:2309.00071
    # longrope: divide each by a factor of its own (arXiv:2402.13753)
    factor: float
    original_context: int = 0  # llama3, yarn and longrope: tokens of context in training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn and longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: of each feature pair, in an engine of at most original_context
    long_factors: tuple[float, ...] = ()  # longrope: the same in an engine of a longer context
    longer: bool = True  # longrope: whether the engine's context is longer than original_context

    def __post_init__(self) -> None:
        if self.kind not in (known := ("linear", "llama3", "yarn", "longrope")):
            raise ValueError(f"RopeScaling.kind={self.kind!r} is not implemented; known: {', '.join(known)}.")
        if self.kind != "linear" and self.original_context < 1:
            raise ValueError(f"RopeScaling.original_context must be >= 1 for {self.kind}, got {self.original_context}.")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RopeScaling.low_freq_factor={self.low_freq_factor} must be > 0 and less than "
                f"high_freq_factor={self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionsConfig:
    """Position information in attention."""

    kind: PositionKind
    theta: float = 10_000.0  # rotary: base wavelength
    rotary_dim: int = 0  # rotary: leading features of each head that are rotated, i paired with i + rotary_dim / 2
    turning_pairs: int | None = None  # rotary: so many pairs turn, the first ones; None: all (Gemma 4)
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.kind is PositionKind.ROTARY and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"PositionsConfig.rotary_dim must be even and >= 2, got {self.rotary_dim}.")
        if self.scaling is not None and self.scaling.kind == "longrope":
            counts = {len(self.scaling.short_factors), len(self.scaling.long_factors)}
            if counts != {self.rotary_dim // 2}:
                raise ValueError(
                    f"RopeScaling.short_factors and long_factors must have a number for each of {self.rotary_dim // 2} "
                    f"feature pairs, got {sorted(counts)}."
                )

    def for_context(self, context: int) -> "PositionsConfig":
        """The positions of an engine whose requests have at most so many tokens, which LongRoPE depends on."""
        if self.scaling is None or self.scaling.kind != "longrope":
            return self
        longer = context > self.scaling.original_context
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, longer=longer))


NO_POSITIONS = PositionsConfig(kind=PositionKind.NONE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A table with a row for each position, added to the embeddings."""

    offset: int = 0  # unused rows at the start of the table (OPT and RoBERTa: 2)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of each head (arXiv:2108.12409, section 3): a geometric sequence from 2^(-8/n).

    If `heads` is not a power of two, the slopes of the next lower power come first, then every second slope of the
    next higher power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return tuple(slopes + extra)
