"""What can go wrong with a system of experts, each raised as early as it can be known. See also `serving.errors`."""

from jaxinfer.serving.errors import FailedError


class ConfigError(ValueError):
    """A config that cannot work."""


class RoutingError(ValueError, LookupError):
    """An expert, a kind of input or a verdict that there is no rule for."""


class ProfileError(ValueError):
    """Costs that are missing, or cannot be."""


class InvalidInputError(ValueError):
    """An input that the expert cannot take."""


class LoadError(FailedError):
    """An expert's checkpoint cannot be loaded; it is tried again after a while."""


class InsufficientMemoryError(FailedError, MemoryError):
    """Not even one request of an expert fits the memory of its executor."""


class ExecutorDiedError(FailedError):
    """The executor that had the request has ended, and no other can take it."""
