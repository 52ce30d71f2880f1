"""How a request may end other than by its answer. Bad input is not among these: it is a ValueError, before it waits."""

from typing import Any


class ServingError(RuntimeError):
    """Any of the errors below."""


class OverloadedError(ServingError):
    """A request that was refused, because too many wait.

    Attributes:
      retry_after: seconds after which there will probably be room; None if nothing has ended yet to tell by.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceededError(ServingError, TimeoutError):
    """The request's deadline passed before it began."""


class ShedError(ServingError):
    """A request that was given up, because its answer could not have come in time."""


class ClosedError(ServingError):
    """What serves was closed: it takes no more requests, and has ended those it had."""


def closed_error(what: str) -> ClosedError:
    """The error of what is closed; `what` is its subject, such as "This system"."""
    return ClosedError(f"{what} is closed: it takes no more requests, and has ended those it had.")


def caused[Error: Exception](error: Error, cause: BaseException) -> Error:
    """An error with its cause, for those who are not there to catch it where it is raised."""
    error.__cause__ = cause
    return error


class DiedError(ServingError):
    """What serves has died, of `__cause__`, and all its requests have ended."""


class FailedError(ServingError):
    """A request has failed; others go on.

    Attributes:
      output: what had come of it, of a request that is answered bit by bit; None if nothing had.
    """

    def __init__(self, message: str, output: Any = None):
        super().__init__(message)
        self.output = output
