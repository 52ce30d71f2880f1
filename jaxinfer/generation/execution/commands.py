"""`Command`: what an executor is told to do, made once on the host; any executor of the same model can run it."""

import dataclasses
from typing import Any

from jaxinfer.compiled import Sizes


@dataclasses.dataclass(frozen=True)
class Command:
    """A change of the state, or a pass through the model.

    Attributes:
      sizes: the program's sizes; for a pass `Pass` or `EncoderSizes`, whose programs depend on where the layers are.
      inputs: what the host gives it: pytrees of numpy arrays.
    """

    sizes: Sizes
    inputs: Any
