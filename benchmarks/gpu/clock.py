"""What fits into the time that a run may take."""

import time
from collections.abc import Iterable, Iterator, Mapping


class Clock:
    """The time of one part: so many seconds from now."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def affordable[T](self, items: Iterable[T]) -> Iterator[T]:
        """The first item, and others as long as there is time for one more that takes as long as the last."""
        took = None
        for item in items:
            start = time.monotonic()
            if took is not None and start + took > self._end:
                return
            yield item
            took = time.monotonic() - start


def clocks(shares: Mapping[str, float], seconds: float) -> Iterator[tuple[str, Clock]]:
    """Each part with a clock, in turn; what one leaves over goes to those after it."""
    end, left = time.monotonic() + seconds, dict(shares)
    for name in shares:
        remaining, total = max(end - time.monotonic(), 0.0), sum(left.values())
        yield name, Clock(remaining * left.pop(name) / total)
