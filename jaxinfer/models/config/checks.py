"""The checks that several configs share: each raises ValueError with the field and its value."""

from collections.abc import Sequence

MAX_LAYERS = 4096
"""A config with more is damaged: it would take the memory of the machine before a weight is found missing."""
MAX_EXPERTS = 2**17
"""Likewise of experts, in all layers together."""


def require_positive(config: object, *names: str) -> None:
    """Check that these fields are at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{type(config).__name__}.{name} must be >= 1, got {getattr(config, name)}.")


def require_sizes(config: object, *names: str) -> None:
    """Check that these fields hold numbers of at least 1."""
    for name in names:
        sizes = getattr(config, name)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{type(config).__name__}.{name} must hold sizes >= 1, got {sizes}.")


def require_layers(config: object, count: int) -> None:
    """Check the number of layers."""
    if count > MAX_LAYERS:
        raise ValueError(f"{type(config).__name__} has {count} layers; models of at most {MAX_LAYERS} are known.")


def require_labels(config: object, labels: Sequence[object], *, least: int = 1) -> None:
    """Check that the field `labels` has the name of at least `least` classes."""
    if isinstance(labels, str) or len(labels) < least or not all(isinstance(x, str) for x in labels):
        raise ValueError(f"{type(config).__name__}.labels must be a tuple with the name of each class, got {labels!r}.")
