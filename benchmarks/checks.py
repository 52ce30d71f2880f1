"""Figures with targets. Imports no JAX, so that a process without a device can judge."""

import abc
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


class Checked(abc.ABC):
    """Something that keeps checks."""

    @abc.abstractmethod
    def add_check(self, check: Check) -> None:
        """Keep a check."""

    def check(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        target: float,
        better: Literal["higher", "lower"] = "higher",
        invalid: str = "",
    ) -> None:
        """Add a figure with a target; `invalid` as in `Check`."""
        value = round(value, 4)
        self.add_check(Check(name=name, value=value, unit=unit, target=target, better=better, invalid=invalid))
