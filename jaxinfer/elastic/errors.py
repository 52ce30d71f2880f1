"""What can go wrong with elastic serving, each raised as early as it can be known."""


class ElasticError(ValueError):
    """Any of the errors below."""


class UnknownTaskError(ElasticError):
    """A task that is not registered."""


class TaskExistsError(ElasticError):
    """A task that is registered already."""


class LevelError(ElasticError):
    """A level that the model or the task does not have."""


class InvalidImageError(ElasticError):
    """An image, or a set of them, that the model cannot take."""


class ShedError(ElasticError):
    """A query that was given up, because its answer could not have come in time."""


class OverloadedError(ElasticError):
    """A query that was refused, because too many wait."""


class ShutdownError(ElasticError):
    """The service was closed before the query was answered."""


class ProfileError(ElasticError):
    """A profile that is missing, or was made with something else than what runs now."""
