"""Ways that requests end other than by an answer. Bad input is not one: it raises ValueError before it waits."""

import copy
from typing import Any


class ServingError(RuntimeError):
    """Any of the errors below.

    Attributes:
      output: the partial output of a request that is answered in steps; None without any.
    """

    output: Any = None


class OverloadedError(ServingError):
    """A request was refused, or had to give way to another one, because too many wait.

    Attributes:
      retry_after: estimated seconds until there is room; None if no request has ended yet to estimate by.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceededError(ServingError, TimeoutError):
    """The request's deadline passed before it began."""


class NotLoadedError(ServingError):
    """A model was not loaded in time: there is no room for it yet, or it cannot be loaded.

    Attributes:
      retry_after: estimated seconds until it may be loaded; None: unknown.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class ShedError(ServingError):
    """A request was shed because its answer could not have come in time."""


class ClosedError(ServingError):
    """The service was closed: it takes no more requests, and has ended those it had."""


def closed_error(what: str) -> ClosedError:
    """The error of a closed service; `what` is its subject, such as "This system"."""
    return ClosedError(f"{what} is closed: it takes no more requests, and has ended those it had.")


def caused[Error: Exception](error: Error, cause: BaseException) -> Error:
    """Attach a cause to an error that is not raised where it would be caught."""
    error.__cause__ = cause
    return error


def with_output[Error: ServingError](error: Error, output: Any) -> Error:
    """Return an error that may be that of several requests as that of one with this partial output."""
    copied = copy.copy(error)
    copied.__cause__, copied.output = error.__cause__, output
    return copied


class DiedError(ServingError):
    """The service has died of `__cause__`, and all its requests have ended."""


class FailedError(ServingError):
    """A request has failed; others go on."""

    def __init__(self, message: str, output: Any = None):
        super().__init__(message)
        self.output = output
