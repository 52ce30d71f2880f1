"""`Pooler`: joins the pooled vectors of a prompt's chunks into the vector of the prompt."""

import dataclasses

import numpy as np

from jaxinfer.models.config import Pooling


@dataclasses.dataclass(frozen=True)
class Pooler:
    """Pools as the model does: chunk by chunk on the devices, then over the chunks here.

    Attributes:
      pooling: how.
      normalize: whether the vector gets length 1.
    """

    pooling: Pooling
    normalize: bool

    def join(self, before: np.ndarray | None, chunk: np.ndarray) -> np.ndarray:
        """Join what the chunks before gave (None: this is the first) and what this one gives; float32 [D]."""
        if before is None:
            return chunk
        match self.pooling:
            case Pooling.MEAN:
                return before + chunk
            case Pooling.MAX:
                return np.maximum(before, chunk)
            case Pooling.CLS:
                return before
            case Pooling.LAST:
                return chunk

    def finish(self, pooled: np.ndarray, tokens: int) -> np.ndarray:
        """Return the vector of a prompt of so many tokens, whose chunks are joined; float32 [D]."""
        vector = pooled / tokens if self.pooling is Pooling.MEAN else pooled
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if self.normalize else vector
