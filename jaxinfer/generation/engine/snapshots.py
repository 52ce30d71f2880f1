"""Snapshots of recurrent states, from which requests with the same beginning go on."""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from jaxinfer.generation.engine.page_pool import Node, PagePool


class Snapshots:
    """Which nodes of a lane's prefix tree have a snapshot of the states after their last token; holds no arrays.

    Keys and values can be shared up to any token, states only where they were copied. A prompt takes snapshots at two
    places: where it leaves what other prompts have in common with it, and near its end. Both are multiples of a page
    and of a chunk. So the chunks of a prompt begin at the same tokens, whatever is cached.

    A snapshot is copied from a slot before the step that follows the one that computes it. It can be used in that step.
    If there is no room, the least recently used gives way.

    Args:
      count: how many snapshots there is room for.
      pool: the lane's pages, and the tree.
      chunk_size: tokens of a chunk of a prompt.
      has_tier: whether a tier takes snapshots that give way.

    Attributes:
      distance: snapshots lie at multiples of so many tokens.
    """

    def __init__(self, count: int, pool: PagePool, chunk_size: int, *, has_tier: bool = False):
        self.count, self._pool, self._has_tier = count, pool, has_tier
        self.distance = math.lcm(pool.page_size, chunk_size)
        self.reset()

    def reset(self) -> None:
        """Forget all snapshots."""
        self._places: OrderedDict[Hashable, int] = OrderedDict()  # by node, the least recently used first
        self._empty = list(reversed(range(self.count)))
        self._coming: dict[int, int] = {}  # place -> slot whose states the step in preparation computes
        self._due: dict[int, int] = {}  # place -> slot whose states earlier steps have computed
        self._followed: set[Hashable] = set()  # nodes after whose snapshot the same conversation has taken a later one
        self._restored: set[int] = set()  # places that the step in preparation fills from a tier
        self._used: set[int] = set()  # places that it copies to slots after that
        self._left: list[tuple[Hashable, int]] = []  # snapshots that gave way, and that still have their content

    def begin_step(self) -> None:
        """Note that the previous step is complete: what it computes can be copied now."""
        self._due |= self._coming
        self._coming.clear()
        self._restored.clear()
        self._used.clear()

    def covered(self, root: Hashable, tokens: Sequence[int]) -> int:
        """Count the leading tokens up to the last snapshot along them."""
        nodes = self._pool.full_nodes(root, tokens)
        while nodes and nodes[-1] not in self._places:
            nodes.pop()
        return len(nodes) * self._pool.page_size

    def ends(self, root: Hashable, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        """The numbers of leading tokens after which a prompt takes snapshots, ascending.

        start: tokens that it takes from the cache.
        """
        common = len(self._pool.full_nodes(root, tokens)) * self._pool.page_size
        last = {count // self.distance * self.distance for count in (common, len(tokens))}
        return tuple(sorted(count for count in last if count > start))

    def is_coming(self, node: Hashable) -> bool:
        """Check whether a node's snapshot is of states that the step in preparation computes."""
        return self._places.get(node) in self._coming

    def use(self, node: Hashable, *, extends: bool) -> int | None:
        """The place of a node's snapshot, for a sequence that goes on from it; None: it has none.

        extends: whether the sequence takes a later one. This one has then served its purpose, unless prompts part here.
        """
        place = self._places.get(node)
        if place is None:
            return None
        self._used.add(place)
        if not extends or self._pool.branches(node):
            self._places.move_to_end(node)
            self._followed.discard(node)
        else:
            self._followed.add(node)
        return place

    def take(self, node: Node, slot: int) -> None:
        """Have the states copied that a slot has after the step in preparation, unless the node has them already."""
        if node in self._places:
            self._places.move_to_end(node)
            return
        self._coming[self._give(node)] = slot

    def restore(self, node: Node) -> int:
        """The place of a node that has no snapshot, into which the step in preparation puts one from a tier."""
        place = self._give(node)
        self._restored.add(place)
        return place

    def _give(self, node: Node) -> int:
        """A place for a node's snapshot; that of another gives way if there is none."""
        if self._empty:
            place = self._empty.pop()
        else:
            oldest = self._oldest()
            place = self._places.pop(oldest)
            if self._is_wanted(oldest):
                self._left.append((oldest, place))
            self._followed.discard(oldest)
        self._places[node] = place
        at: Hashable = node
        while isinstance(at, Node) and not at.leads_to_state:
            at.leads_to_state = True
            at = at.parent
        return place

    def _is_wanted(self, node: Hashable) -> bool:
        """Check whether a tier is to have a node's snapshot: not if a longer one of its conversation follows."""
        return self._has_tier and (node not in self._followed or self._pool.branches(node))

    def copied(self, node: Hashable) -> int | None:
        """The place of a node's snapshot that a tier is to have, and that has its content; None: there is none."""
        place = self._places.get(node)
        if place is None or place in self._coming or place in self._due or place in self._restored:
            return None
        return place if self._is_wanted(node) else None

    def take_left(self) -> list[tuple[Hashable, int]]:
        """Take the (node, place) of the snapshots that gave way since the last call, for a tier.

        They keep their content until the next step copies to their places.
        """
        left, self._left = self._left, []
        return left

    def _oldest(self) -> Hashable:
        """The node whose snapshot gives way: one that has left the tree, or the least recently used.

        None of those that the step in preparation fills or uses: these are at most two for each slot.
        """
        busy = self._coming.keys() | self._restored | self._used
        old = [node for node, place in self._places.items() if place not in busy]
        return next((node for node in old if not self._pool.has(node)), old[0])

    def take_due(self) -> tuple[tuple[int, int], ...]:
        """The (slot, place) of the snapshots that the step in preparation copies before anything else."""
        due, self._due = self._due, {}
        return tuple((slot, place) for place, slot in due.items())

    def check_integrity(self) -> None:
        """Raise AssertionError unless each place is empty or has one snapshot."""
        assert sorted([*self._places.values(), *self._empty]) == list(range(self.count))
        assert set(self._places.values()).issuperset(self._coming)
