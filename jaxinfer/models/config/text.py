"""The part of a config that decoders and encoders share."""

import dataclasses
import enum

from jaxinfer.models.config.checks import require_positive
from jaxinfer.models.config.layers import LayersConfig


class Pooling(enum.StrEnum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"  # average over the real tokens
    CLS = "cls"  # the first token's vector
    MAX = "max"  # the largest value of each feature
    LAST = "last"  # the last token's vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModelConfig(LayersConfig):
    """A model of text."""

    vocab: int
    context: int  # maximal tokens of a request, prompt and output together
    padded_vocab: int | None = None  # rows of the embedding and the head; from `vocab` on no tokens. None: vocab
    pooling: Pooling = Pooling.MEAN  # of a text to embed
    normalize: bool = True  # the vector of a text to length 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "vocab", "context")
        if self.padded_vocab is not None and self.padded_vocab < self.vocab:
            raise ValueError(f"padded_vocab={self.padded_vocab} is less than vocab={self.vocab}.")

    @property
    def output_width(self) -> int:
        """The width of the vectors that the model returns."""
        return self.embed

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the head."""
        return self.vocab if self.padded_vocab is None else self.padded_vocab
