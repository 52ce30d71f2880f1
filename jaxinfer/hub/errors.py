"""Errors of what is fetched from the hub; each message is one line that says what to do."""

from jaxinfer.checkpoints import CheckpointError


class HubError(CheckpointError):
    """A repository that cannot be fetched, or that holds no model of ours."""


class UnreachableError(HubError):
    """The hub does not answer, or may not be asked."""
