"""Errors of a system of experts, each raised as early as possible. See also `serving.errors`."""

from jaxinfer.serving.errors import FailedError


class ConfigError(ValueError):
    """A config that cannot work."""


class RoutingError(ValueError, LookupError):
    """An expert, a kind of input or a verdict without a rule."""


class ProfileError(ValueError):
    """Costs that are missing or impossible."""


class InvalidInputError(ValueError):
    """An input that the expert cannot take."""


class LoadError(FailedError):
    """An expert's checkpoint cannot be loaded; loading is tried again after a while."""


class InsufficientMemoryError(FailedError, MemoryError):
    """Not even one request of an expert fits its executor's memory."""


class ExecutorDiedError(FailedError):
    """The executor of the request has died, and no other can take it."""
