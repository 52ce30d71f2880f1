"""The sizes that programs are compiled for: a batch is padded to the next larger one."""

from collections.abc import Sequence


def round_up(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `size`. Raises ValueError if none does."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    raise ValueError(f"{size} is larger than the largest bucket, {sizes[-1]}.")


def powers(factor: int, first: int, last: int) -> tuple[int, ...]:
    """Return first, factor * first, factor^2 * first, ... and `last` itself, ascending.

    >>> powers(4, 16, 512)
    (16, 64, 256, 512)
    """
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
