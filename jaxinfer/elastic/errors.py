"""Errors of elastic serving, each raised as early as possible. See also `serving.errors`."""


class ElasticError(ValueError):
    """Any of the errors below."""


class UnknownTaskError(ElasticError):
    """A task that is not registered."""


class TaskExistsError(ElasticError):
    """A task that is registered already."""


class LevelError(ElasticError):
    """A level that the model or the task does not have."""


class InvalidImageError(ElasticError):
    """An image, or a set of images, that the model cannot take."""


class ProfileError(ElasticError):
    """A profile that is missing, or was not made with the present programs."""
