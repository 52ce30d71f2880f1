"""What can go wrong with a system of experts, each raised as early as it can be known."""


class CollaborationError(Exception):
    """Any of the errors below."""


class ConfigError(CollaborationError, ValueError):
    """A config that cannot work."""


class RoutingError(CollaborationError, LookupError):
    """An expert, a kind of input or a verdict that there is no rule for."""


class ProfileError(CollaborationError, ValueError):
    """Costs that are missing, or cannot be."""


class InvalidInputError(CollaborationError, ValueError):
    """An input that the expert cannot take."""


class OverloadedError(CollaborationError):
    """Too many requests wait.

    Attributes:
      retry_after: seconds after which there will probably be room.
    """

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceededError(CollaborationError, TimeoutError):
    """A request's deadline passed before its expert began."""


class LoadError(CollaborationError):
    """An expert's checkpoint cannot be loaded; it is tried again after a while."""


class InsufficientMemoryError(CollaborationError, MemoryError):
    """Not even one request of an expert fits the memory of its executor."""


class ExecutorDiedError(CollaborationError):
    """The executor that had the request has ended, and no other can take it."""


class ShutdownError(CollaborationError):
    """The system was closed before the request was done."""
