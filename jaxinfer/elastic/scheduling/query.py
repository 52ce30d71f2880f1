"""Queries and their outcomes."""

import dataclasses
import enum
from typing import Any

from jaxinfer.fields import NotNegative, check_fields


class Outcome(enum.IntEnum):
    """The way a query ended (OTAS, section V, "the execution type of a query")."""

    CORRECT = 1  # in time, with the right answer
    WRONG = 2  # in time, with a wrong one
    LATE = 3  # answered after its deadline
    SHED = 4  # not answered: it could not have been in time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """An image that waits for its answer.

    Attributes:
      id: the query's number.
      task: the task whose classes it is sorted into.
      arrival: time of arrival in seconds, on the controller's clock.
      latency: seconds from arrival within which the answer has a value.
      utility: the value of a right answer in time.
      payload: the image, or anything else that its runner needs; controllers ignore it.
    """

    id: int
    task: str
    arrival: float
    latency: NotNegative
    utility: NotNegative
    payload: Any = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def deadline(self) -> float:
        """The time before which it must be answered."""
        return self.arrival + self.latency
