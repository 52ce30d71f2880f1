"""Which page of the KV cache belongs to whom, and which finished pages can be used again.

A page whose keys and values are known is a `Node` of a tree: the tokens in it, after the tokens of its parent. A new
request walks the tree along its own tokens and shares every page it finds (prefix caching: Kwon et al. 2023,
arXiv:2309.06180, section 4.3). Pages that nobody holds stay in the tree until their place is needed, least recently
used first.
"""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

MOST_COMPARED = 32
"""Children that are compared token by token when none fits as a whole; the newest come first."""


class Node:
    """A page in the tree: its number, its tokens, and the node or root before it."""

    __slots__ = ("page", "parent", "tokens")

    def __init__(self, page: int, parent: Hashable, tokens: tuple[int, ...]):
        self.page, self.parent, self.tokens = page, parent, tokens


class Match(NamedTuple):
    """What is known of a request's first tokens; its pages are held, `copy_from` included, until released.

    Attributes:
      pages: full pages, to be shared. parent: the last of their nodes, or the root.
      copy_from: a page whose first `copied` tokens go on from there, to be copied before it is written; -1 if none.
    """

    pages: list[int]
    parent: Hashable
    copy_from: int = -1
    copied: int = 0


class PagePool:
    """Hands out page numbers in [0, count), counts their holders, and finds them by their tokens.

    Holds no memory itself. Keys and values depend on more than tokens where requests have adapters: `root` names
    what requests must have in common to share pages.
    """

    def __init__(self, count: int, page_size: int):
        self.count, self.page_size = count, page_size
        self._empty = list(reversed(range(count)))
        self._holders: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # in the tree, held by nobody; the oldest first
        self._node_of: dict[int, Node] = {}
        self._children: defaultdict[Hashable, dict[tuple[int, ...], Node]] = defaultdict(dict)

    @property
    def free(self) -> int:
        """Pages nobody holds, whether or not their contents are still known."""
        return len(self._empty) + len(self._unused)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, held once. Raises ValueError if there are fewer; ask `free` first."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} of {self.count} free.")
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give up a request's pages, in their order; the last are the first to be used again."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._node_of:
                self._unused[page] = None
            else:
                self._empty.append(page)

    def match(self, root: Hashable, tokens: Sequence[int]) -> Match:
        """The longest beginning of `tokens` whose keys and values are known."""
        size, parent, pages = self.page_size, root, []
        while node := self._children[parent].get(tuple(tokens[len(pages) * size : (len(pages) + 1) * size])):
            if len(node.tokens) < size:
                break
            pages.append(node.page)
            parent = node
        rest = tuple(tokens[len(pages) * size :][:size])
        newest = itertools.islice(reversed(self._children[parent].values()), MOST_COMPARED)
        best = max(newest, key=lambda node: _common(node.tokens, rest), default=None)
        copied = _common(best.tokens, rest) if best else 0
        found = Match(pages, parent, best.page, copied) if best and copied else Match(pages, parent)
        self._hold([*pages, found.copy_from] if copied else pages)
        if not self._children[parent]:
            del self._children[parent]
        return found

    def register(self, parent: Hashable, tokens: Sequence[int], page: int) -> Hashable:
        """Make a held page findable: it holds the keys and values of `tokens`, which follow the parent's.

        Returns the node to give as `parent` of the next page: an older one, if the same tokens are known already.
        """
        key = tuple(tokens)
        if (known := self._children[parent].get(key)) is not None:
            return known
        if page in self._node_of:  # it has grown since
            self._forget(page)
        node = Node(page, parent, key)
        self._children[parent][key] = self._node_of[page] = node
        return node

    def clear(self) -> None:
        """Forget all contents; who holds what stays as it is."""
        self._empty += self._unused
        self._unused.clear()
        self._node_of.clear()
        self._children.clear()

    def _hold(self, pages: list[int]) -> None:
        for page in pages:
            self._unused.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def _forget(self, page: int) -> None:
        node = self._node_of.pop(page)
        siblings = self._children[node.parent]
        del siblings[node.tokens]
        if not siblings:
            del self._children[node.parent]

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is empty, unused or held exactly as often as `held` says.

        Args:
          held: the pages of every request that has any.
        """
        holders: defaultdict[int, int] = defaultdict(int)
        for pages in held:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            for page in pages:
                holders[page] += 1
        assert holders == self._holders, f"held {dict(holders)}, counted {self._holders}"
        places = [*self._empty, *self._unused, *self._holders]
        assert sorted(places) == list(range(self.count)), f"pages lost or doubled: {sorted(places)}"
        for page, node in self._node_of.items():
            assert node.page == page
            assert self._children[node.parent][node.tokens] is node
            assert 0 < len(node.tokens) <= self.page_size
        assert all(page in self._node_of for page in self._unused)
        assert sum(map(len, self._children.values())) == len(self._node_of)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    equal = (a == b for a, b in zip(first, second, strict=False))
    return sum(itertools.takewhile(bool, equal))
