"""What elastic serving cannot take, each raised as early as it can be known. See also `serving.errors`."""


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


class ProfileError(ElasticError):
    """A profile that is missing, or was made with something else than what runs now."""
