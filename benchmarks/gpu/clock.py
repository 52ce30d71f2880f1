"""Time limits for the parts of a run."""

import time
from collections.abc import Iterable, Iterator, Mapping


class Clock:
    """The time limit of one part, `seconds` from now."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def affordable[T](self, items: Iterable[T]) -> Iterator[T]:
        """Yield the first item, and more while there is time for another one that takes as long as the last."""
        took = None
        for item in items:
            start = time.monotonic()
            if took is not None and start + took > self._end:
                return
            yield item
            took = time.monotonic() - start


def clocks(weights: Mapping[str, float], seconds: float) -> Iterator[tuple[str, Clock]]:
    """Yield each part with its clock, dividing the time by weight; unused time goes to the later parts."""
    end, left = time.monotonic() + seconds, dict(weights)
    for name in weights:
        remaining, total = max(end - time.monotonic(), 0.0), sum(left.values())
        yield name, Clock(remaining * left.pop(name) / total)
