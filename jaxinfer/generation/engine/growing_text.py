"""The text of a completion while it grows."""

from jaxinfer.generation.stop_strings import StopStrings

BLOCK = 1024
"""How many characters are copied, at most, when a piece is added."""


class GrowingText:
    """A text that grows by pieces until a stop string ends it. A piece, and a view of it, cost the same in any length.

    Args:
      stop: the stop strings.
      keeps_stop: whether the text keeps the stop string that ends it.

    Attributes:
      blocks: the text but for its end; blocks never change, and the list only grows.
      end: the text after the blocks.
      num_held_back: how many of its last characters could begin a stop string that the text would not keep.
    """

    def __init__(self, stop: tuple[str, ...] = (), *, keeps_stop: bool = False):
        self.blocks: list[str] = []
        self.end, self.num_held_back = "", 0
        self._stops, self._keeps_stop = StopStrings(stop) if stop else None, keeps_stop

    def __str__(self) -> str:
        return "".join(self.blocks) + self.end

    def add(self, piece: str, *, may_stop: bool = True) -> str | None:
        """Add a piece, up to a stop string; returns that, or None.

        may_stop: whether a stop string may end the text; if not, none may begin in the text so far.
        """
        before = len(self.end)
        self.end += piece
        if self._stops is not None:
            if not may_stop:
                self._stops.forget()
            elif place := self._stops.push(piece):
                at, stop = place
                self.end, self.num_held_back = self.end[: before + at + len(stop) * self._keeps_stop], 0
                return stop
            self.num_held_back = 0 if self._keeps_stop else self._stops.num_begun
        if len(self.end) - self.num_held_back >= BLOCK:
            at = len(self.end) - self.num_held_back
            self.blocks.append(self.end[:at])
            self.end = self.end[at:]
        return None
