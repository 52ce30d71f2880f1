"""Bookkeeping of the KV cache: which request has which page, and the tree of cached prefixes.

A page whose keys and values are known is a `Node` of a tree: the tokens in it, after the tokens of its parent. A new
request walks the tree along its own tokens and shares every page it finds (prefix caching: Kwon et al. 2023,
arXiv:2309.06180, section 4.3). Pages with no references stay in the tree until they are needed for something else,
least recently used first.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

MAX_COMPARED = 32
"""How many children are compared token by token when none matches as a whole; the newest come first."""


class Node:
    """A page in the tree: its number, its tokens, and the node or root before it.

    `PagePool.key_of` sets the key, `Snapshots` whether a state was copied after its last token or after a later one.
    """

    __slots__ = ("key", "leads_to_state", "page", "parent", "tokens")

    def __init__(self, page: int, parent: Hashable, tokens: tuple[int, ...]):
        self.page, self.parent, self.tokens = page, parent, tokens
        self.key: bytes | None = None
        self.leads_to_state = False


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page's content in every process: a hash of the key before it and its own tokens."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=32).digest()


class Match(NamedTuple):
    """The cached prefix of a request. Its pages, `copy_from` included, are referenced until released.

    Attributes:
      pages: full pages, to be shared.
      parent: the last of their nodes, or the root.
      copy_from: a page whose first tokens continue the prefix, to be copied before it is written; -1 if none.
      num_copied_tokens: how many tokens of that page.
    """

    pages: list[int]
    parent: Hashable
    copy_from: int = -1
    num_copied_tokens: int = 0


class PoolListener(Protocol):
    """Hears which full pages are in the tree. It is called in the middle of a step, so it must be quick."""

    def stored(self, node: Node) -> None:
        """Note a full page that has entered the tree."""
        ...

    def removed(self, node: Node) -> None:
        """Note a full page that has left the tree."""
        ...

    def cleared(self) -> None:
        """Note that all pages have left the tree."""
        ...


class PagePool:
    """Hands out page numbers in [0, count), counts references to them, and finds them by their tokens.

    Has no memory itself. With adapters, keys and values depend on more than tokens: `root` names everything else that
    requests must have in common to share pages.

    Args:
      identity: makes a hash of all that pages after a root depend on beside their tokens, for the keys of pages; None:
        nobody wants to know which pages are forgotten.

    Attributes:
      listener: hears what enters and leaves the tree; None: nobody does.
    """

    def __init__(self, count: int, page_size: int, identity: Callable[[Hashable], bytes] | None = None):
        self.count, self.page_size, self._identity = count, page_size, identity
        self.listener: PoolListener | None = None
        self.reset()

    def reset(self) -> None:
        """Start over: every page is empty, whoever had it."""
        self._empty = list(reversed(range(self.count)))
        self._ref_counts: dict[int, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # in the tree; the oldest first
        self._node_of: dict[int, Node] = {}
        # Nearly all nodes have one child, which then needs no dictionary of its own.
        self._children: dict[Hashable, Node | dict[tuple[int, ...], Node]] = {}
        self._forgotten: list[Node] = []  # full pages that gave way, and that still have their content
        if self.listener is not None:
            self.listener.cleared()

    @property
    def free(self) -> int:
        """Pages without references, whether or not they are in the tree."""
        return len(self._empty) + len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Pages in the tree without references."""
        return len(self._unreferenced)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, each with one reference. Raises ValueError if there are fewer; check `free` first."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} of {self.count} free.")
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._unreferenced.popitem(last=False)
                node = self._remove(page)
                if self._identity is not None and len(node.tokens) == self.page_size:
                    self._forgotten.append(node)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def take_forgotten(self) -> list[Node]:
        """Return the full pages that `allocate` took from the tree since the last call, in their order.

        They keep their content until the next step writes.
        """
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def key_of(self, place: Hashable) -> bytes:
        """The key of a node or root."""
        path = []
        while isinstance(place, Node) and place.key is None:
            path.append(place)
            place = place.parent
        if isinstance(place, Node):
            key = place.key
            assert key is not None
        else:
            assert self._identity is not None
            key = self._identity(place)
        for node in reversed(path):
            key = node.key = page_key(key, node.tokens)
        return key

    def has(self, node: Hashable) -> bool:
        """Check whether a node is in the tree."""
        return isinstance(node, Node) and self._node_of.get(node.page) is node

    def keys_after(self, place: Hashable, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the full pages of tokens that follow a node or root."""
        key, size = self.key_of(place), self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            key = page_key(key, tokens[start : start + size])
            yield key

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each of a request's pages, in their order; the last are the first to be used again."""
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page]:
                continue
            del self._ref_counts[page]
            if page in self._node_of:
                self._unreferenced[page] = None
            else:
                self._empty.append(page)

    def match(self, root: Hashable, tokens: Sequence[int]) -> Match:
        """Return the longest cached prefix of `tokens`."""
        size, nodes = self.page_size, self.full_nodes(root, tokens)
        parent, pages = nodes[-1] if nodes else root, [node.page for node in nodes]
        rest = tuple(tokens[len(pages) * size :][:size])
        closest = max(self._newest_children(parent), key=lambda node: _common(node.tokens, rest), default=None)
        copied = _common(closest.tokens, rest) if closest else 0
        match = Match(pages, parent, closest.page, copied) if closest and copied else Match(pages, parent)
        self._reference([*pages, match.copy_from] if copied else pages)
        return match

    def count_cached_tokens(self, root: Hashable, tokens: Sequence[int]) -> int:
        """Return how many leading `tokens` full pages have; references and the order of use stay as they are."""
        return len(self.full_nodes(root, tokens)) * self.page_size

    def count_shared_pages(self, root: Hashable, tokens: Sequence[int]) -> int:
        """Return how many full pages along the tokens have references, so that sharing them takes no free page."""
        return sum(node.page in self._ref_counts for node in self.full_nodes(root, tokens))

    def full_nodes(self, root: Hashable, tokens: Sequence[int]) -> list[Node]:
        """The full pages along the tokens."""
        size, parent, nodes = self.page_size, root, []
        while parent in self._children:
            node = self._child(parent, tuple(tokens[len(nodes) * size : (len(nodes) + 1) * size]))
            if node is None or len(node.tokens) < size:
                break
            nodes.append(node)
            parent = node
        return nodes

    def branches(self, place: Hashable) -> bool:
        """Check whether several pages follow a node or root."""
        children = self._children.get(place)
        return isinstance(children, dict) and len(children) > 1

    def _child(self, parent: Hashable, tokens: tuple[int, ...]) -> Node | None:
        children = self._children.get(parent)
        if isinstance(children, Node):
            return children if children.tokens == tokens else None
        return None if children is None else children.get(tokens)

    def _newest_children(self, parent: Hashable) -> list[Node]:
        children = self._children.get(parent, {})
        if isinstance(children, Node):
            return [children]
        return list(itertools.islice(reversed(children.values()), MAX_COMPARED))

    def insert(self, parent: Hashable, tokens: Sequence[int], page: int) -> Hashable:
        """Insert a referenced page into the tree; it holds the keys and values of `tokens`, which follow the parent's.

        Returns the node to give as `parent` of the next page: an older one, if the same tokens are in the tree already.
        """
        key, children = tuple(tokens), self._children
        if parent in children and (known := self._child(parent, key)) is not None:
            return known
        if page in self._node_of:  # it has grown since
            self._remove(page)
        self._node_of[page] = node = Node(page, parent, key)
        if self.listener is not None and len(key) == self.page_size:
            self.listener.stored(node)
        siblings = children.setdefault(parent, node)
        if siblings is node:  # nearly always
            return node
        if isinstance(siblings, dict):
            siblings[key] = node
        else:
            children[parent] = {siblings.tokens: siblings, key: node}
        return node

    def clear(self) -> None:
        """Empty the tree; references stay as they are."""
        self._empty += self._unreferenced
        self._unreferenced.clear()
        self._node_of.clear()
        self._children.clear()
        if self.listener is not None:
            self.listener.cleared()

    def _reference(self, pages: list[int]) -> None:
        for page in pages:
            self._unreferenced.pop(page, None)
            self._ref_counts[page] = self._ref_counts.get(page, 0) + 1

    def _remove(self, page: int) -> Node:
        node = self._node_of.pop(page)
        siblings = self._children[node.parent]
        if isinstance(siblings, dict):
            del siblings[node.tokens]
        if siblings is node or not siblings:
            del self._children[node.parent]
        if self.listener is not None and len(node.tokens) == self.page_size:
            self.listener.removed(node)
        return node

    def check_integrity(self, page_lists: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is empty, unreferenced or referenced as often as it is listed.

        Args:
          page_lists: the pages of every request that has any.
        """
        expected: defaultdict[int, int] = defaultdict(int)
        for pages in page_lists:
            assert len(set(pages)) == len(pages), f"a request has a page twice: {pages}"
            for page in pages:
                expected[page] += 1
        assert expected == self._ref_counts, f"listed {dict(expected)}, counted {self._ref_counts}"
        places = [*self._empty, *self._unreferenced, *self._ref_counts]
        assert sorted(places) == list(range(self.count)), f"pages lost or doubled: {sorted(places)}"
        for page, node in self._node_of.items():
            assert node.page == page
            assert self._child(node.parent, node.tokens) is node
            assert 0 < len(node.tokens) <= self.page_size
        assert all(page in self._node_of for page in self._unreferenced)
        children = self._children.values()
        assert sum(len(nodes) if isinstance(nodes, dict) else 1 for nodes in children) == len(self._node_of)
        assert all(children)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The length of the common prefix."""
    equal = (a == b for a, b in zip(first, second, strict=False))
    return sum(itertools.takewhile(bool, equal))
