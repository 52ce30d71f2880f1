"""How few loads any scheduler could do with."""

from collections.abc import Iterable, Set


def compulsory_loads(used: Iterable[str], resident: Set[str]) -> int:
    """The least if requests may run in any order: every expert that is used and not there yet, once."""
    return len(set(used) - resident)
