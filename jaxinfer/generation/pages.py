"""Which page of the KV cache belongs to whom."""


class PagePool:
    """Hands out page numbers in [0, count) and takes them back; holds no memory itself."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages. Raises ValueError if there are fewer; ask `free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} of {self.count} free.")
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Take back pages that `allocate` gave."""
        self._free.extend(pages)
        assert len(self._free) <= self.count, "a page was released twice"
