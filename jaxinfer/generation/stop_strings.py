"""Stop strings in a text that grows."""

import functools


class StopStrings:
    """Finds the first stop string in a text, and how much of the text's end could begin one.

    Each character is looked at once for each stop string (Knuth, Morris and Pratt 1977, doi:10.1137/0206024).

    >>> stops = StopStrings(("end",))
    >>> stops.push("one e"), stops.num_begun, stops.push("nds")
    (None, 1, (-1, 'end'))
    """

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._begun = [0] * len(stop)  # the most characters of each with which the text ends

    @property
    def num_begun(self) -> int:
        """The number of characters at the end of the text that could begin a stop string."""
        return max(self._begun, default=0)

    def forget(self) -> None:
        """Let no stop string begin in the text so far."""
        self._begun = [0] * len(self._stop)

    def push(self, piece: str) -> tuple[int, str] | None:
        """Add a piece of text; returns the stop string that it completes and where that begins in it, or None.

        The place is negative if the stop string began before; of several, the first to begin counts.
        """
        places = [(at, stop) for index, stop in enumerate(self._stop) if (at := self._find(index, piece)) is not None]
        return min(places, key=lambda place: place[0], default=None)

    def _find(self, index: int, piece: str) -> int | None:
        stop, begun = self._stop[index], self._begun[index]
        if not begun and stop[0] not in piece:
            return None
        borders = _borders(stop)
        for at, character in enumerate(piece):
            while begun and stop[begun] != character:
                begun = borders[begun - 1]
            begun += stop[begun] == character
            if begun == len(stop):
                return at + 1 - len(stop)
        self._begun[index] = begun
        return None


@functools.lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """The length of the longest beginning with which each longer beginning of a text ends."""
    borders = [0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length - 1]
        borders.append(length + (text[length] == character))
    return tuple(borders)
