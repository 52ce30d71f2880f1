"""An executor's queue: groups of requests that use the same expert (paper section 4.2, arranging and splitting)."""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from jaxinfer.collaboration.scheduling.request import Request


@dataclasses.dataclass(eq=False)
class Group:
    """Requests for one expert that are next to each other, in the order of their arrival."""

    place: int
    expert: str
    requests: deque[Request]


class ExecutorQueue:
    """Groups in the order in which they will run.

    Args:
      arranged: whether a request goes behind the last queued one with its expert; otherwise behind all.
      max_age: a request does not go before one that has waited longer than this, in seconds; None: before any.

    Attributes:
      latency: the sum of the requests' additional inference latencies.
    """

    def __init__(self, *, arranged: bool, max_age: float | None = None):
        self._arranged, self._max_age = arranged, max_age
        self._groups: dict[int, Group] = {}
        self._last: dict[str, Group] = {}  # of each expert
        self._counts: Counter[str] = Counter()
        self._end = 0
        self.latency = 0.0

    def add(self, request: Request) -> bool:
        """Put a request where it belongs; True if it joins others for its expert."""
        group = self._last.get(request.expert)
        joins = group is not None and self._may_join(group, request)
        if group is None or not joins:
            group = self._groups[self._end] = Group(self._end, request.expert, deque())
            self._last[request.expert] = group
            self._end += 1
        group.requests.append(request)
        self._counts[request.expert] += 1
        self.latency += request.latency
        return joins

    def take(self, group: Group, count: int) -> list[Request]:
        """Take the first requests of a group."""
        taken = [group.requests.popleft() for _ in range(count)]
        self._forget(taken)
        if not group.requests:
            self._drop(group)
        return taken

    def remove(self, request: Request) -> bool:
        """Take a request out; False if it is not there any more."""
        for group in self._groups.values():
            if request in group.requests:
                group.requests.remove(request)
                self._forget([request])
                if not group.requests:
                    self._drop(group)
                return True
        return False

    def remove_expert(self, expert: str) -> list[Request]:
        """Take all requests for an expert out."""
        removed = []
        for group in [group for group in self._groups.values() if group.expert == expert]:
            removed += self.take(group, len(group.requests))
        return removed

    def first(self) -> Group | None:
        """The group that runs next."""
        return next(iter(self._groups.values()), None)

    def groups(self) -> Iterable[Group]:
        """In the order in which they will run."""
        return self._groups.values()

    def count(self, expert: str) -> int:
        """How many requests for an expert wait."""
        return self._counts[expert]

    def experts(self) -> list[str]:
        """Experts in the order in which they will be needed."""
        return list(dict.fromkeys(group.expert for group in self._groups.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for group in self._groups.values() for request in group.requests)

    def __len__(self) -> int:
        return self._counts.total()

    def _may_join(self, group: Group, request: Request) -> bool:
        behind = next((p for p in range(group.place + 1, self._end) if p in self._groups), None)
        if behind is None:
            return True
        # Groups are in the order of their first requests: what is overtaken has waited no longer than this one.
        waited = request.arrival - self._groups[behind].requests[0].arrival
        return self._arranged and (self._max_age is None or waited <= self._max_age)

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            self._counts[request.expert] -= 1
            if not self._counts[request.expert]:
                del self._counts[request.expert]
            self.latency -= request.latency
        if not self._counts:
            self.latency = 0.0  # no rounding error stays

    def _drop(self, group: Group) -> None:
        del self._groups[group.place]
        if self._last[group.expert] is group:
            del self._last[group.expert]
