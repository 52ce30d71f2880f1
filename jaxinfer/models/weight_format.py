"""The format in which a model's matrices are stored."""

import dataclasses

import numpy as np

from jaxinfer.pallas_kernels.weights import GROUP, STORED_AS, QuantizedFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How the matrices of a model are stored.

    Attributes:
      dtype: of float matrices; a quantised model computes in it.
      quantized: the format of quantised matrices (`pallas_kernels/weights.py`), or None.
    """

    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    quantized: QuantizedFormat | None = None

    def of_matrix(self, inputs: int) -> QuantizedFormat | None:
        """The format of a matrix with this many inputs: int4 needs whole groups of them, others are int8."""
        return "int8" if self.quantized == "int4" and inputs % GROUP else self.quantized

    @property
    def of_table(self) -> QuantizedFormat | None:
        """The format of an embedding, which is never int4: its rows are looked up, and in a tied model multiplied."""
        return "int8" if self.quantized == "int4" else self.quantized

    @property
    def matrix_dtype(self) -> np.dtype:
        """The dtype of the stored arrays of most matrices."""
        return np.dtype({None: self.dtype, **STORED_AS}[self.quantized])
