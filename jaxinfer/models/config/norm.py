"""How hidden vectors are normalised."""

import dataclasses
import enum


class NormKind(enum.StrEnum):
    """How a hidden vector is normalised."""

    LAYER = "layer"  # subtract the mean, divide by the deviation, scale and shift
    RMS = "rms"  # divide by the root mean square, scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Normalisation, the same kind everywhere in a model."""

    kind: NormKind
    eps: float = 1e-5
    affine: bool = True  # whether scale and bias are of the checkpoint; else they are 1 and 0 (Galactica)

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"NormConfig.eps must be in [0, 1), got {self.eps}.")
