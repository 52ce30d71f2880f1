"""Serving requests, for every decider: threads, tickets, errors and statistics. Start at `loop.py`."""

from jaxinfer.serving.errors import (
    ClosedError,
    DeadlineExceededError,
    DiedError,
    FailedError,
    NotLoadedError,
    OverloadedError,
    ServingError,
    ShedError,
)

__all__ = [
    "ClosedError",
    "DeadlineExceededError",
    "DiedError",
    "FailedError",
    "NotLoadedError",
    "OverloadedError",
    "ServingError",
    "ShedError",
]
