"""Figures with targets. Imports no JAX, so that a process without a device can judge."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A figure with a target, met by values at least ("higher") or at most ("lower") as large.

    Attributes:
      invalid: the reason that the value says nothing about the target, or "".
    """

    name: str
    value: float
    unit: str
    target: float
    better: Literal["higher", "lower"]
    invalid: str = ""

    @property
    def met(self) -> bool:
        if self.invalid:
            return False
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    @property
    def verdict(self) -> str:
        return self.invalid or ("met" if self.met else "missed")
