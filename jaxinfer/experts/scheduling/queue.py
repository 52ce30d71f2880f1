"""An executor's queue: groups of requests that use the same expert (paper section 4.2, arranging and splitting)."""

import dataclasses
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from jaxinfer.experts.scheduling.request import Request


@dataclasses.dataclass(eq=False)
class Group:
    """Adjacent requests for one expert, in the order of their arrival.

    Attributes:
      before: the group before it.
      behind: the group behind it.
      latency: the sum of its requests' additional inference latencies.
    """

    expert: str
    requests: OrderedDict[Request, None] = dataclasses.field(default_factory=OrderedDict)
    before: "Group | None" = None
    behind: "Group | None" = None
    latency: float = 0.0
    _deadlines: list[tuple[float, int, Request]] = dataclasses.field(default_factory=list)  # a heap; some have left

    def add(self, request: Request) -> None:
        """Append a request."""
        self.requests[request] = None
        self.latency += request.latency
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id, request))

    @property
    def most_urgent(self) -> tuple[float, Request] | None:
        """The earliest deadline, with its request; None if none has one."""
        while self._deadlines and self._deadlines[0][-1] not in self.requests:
            heapq.heappop(self._deadlines)
        return (self._deadlines[0][0], self._deadlines[0][-1]) if self._deadlines else None

    @property
    def first(self) -> Request:
        """The request that has waited longest."""
        return next(iter(self.requests))


class ExecutorQueue:
    """Groups in the order in which they will run.

    Args:
      arranged: whether a request queues behind the last one for its expert, rather than behind all.
      max_age: a request does not overtake one that arrived more than this many seconds earlier; None: no limit.

    Attributes:
      latency: the sum of the requests' additional inference latencies.
    """

    def __init__(self, *, arranged: bool, max_age: float | None = None):
        self._arranged, self._max_age = arranged, max_age
        self._groups: OrderedDict[Group, None] = OrderedDict()
        self._last: dict[str, Group] = {}  # by expert
        self._group_of: dict[Request, Group] = {}
        self._counts: Counter[str] = Counter()
        self._end: Group | None = None  # the last group
        self.latency = 0.0

    def add(self, request: Request) -> bool:
        """Queue a request; return True if it joins others for its expert."""
        group = self._last.get(request.expert)
        joins = group is not None and self._may_join(group, request)
        if group is None or not joins:
            group = self._append(request.expert)
        group.add(request)
        self._group_of[request] = group
        self._counts[request.expert] += 1
        self.latency += request.latency
        return joins

    def take(self, group: Group, count: int, urgent: Request | None = None) -> list[Request]:
        """Take the first requests of a group, an urgent one before the others."""
        taken = list(itertools.islice(group.requests, count))
        if urgent is not None:
            taken = [urgent, *(request for request in taken if request is not urgent)][:count]
        for request in taken:
            self._remove(request, group)
        return taken

    def remove(self, request: Request) -> bool:
        """Remove a request; return False if it is not queued any more."""
        group = self._group_of.get(request)
        if group is not None:
            self._remove(request, group)
        return group is not None

    def remove_expert(self, expert: str) -> list[Request]:
        """Remove and return all requests for an expert."""
        removed = []
        for group in [group for group in self._groups if group.expert == expert]:
            removed += self.take(group, len(group.requests))
        return removed

    def first(self) -> Group | None:
        """The group that runs next."""
        return next(iter(self._groups), None)

    def groups(self) -> Iterable[Group]:
        """The groups in the order in which they will run."""
        return self._groups

    def count(self, expert: str) -> int:
        """Count the requests that wait for an expert."""
        return self._counts[expert]

    def experts(self) -> list[str]:
        """The experts in the order in which they will be needed."""
        return list(dict.fromkeys(group.expert for group in self._groups))

    def may_overtake(self, request: Request, other: Request) -> bool:
        """Check whether a request may run before an earlier one, which must not have waited too much longer."""
        return self._max_age is None or request.arrival - other.arrival <= self._max_age

    def __contains__(self, request: object) -> bool:
        return request in self._group_of

    def __iter__(self) -> Iterator[Request]:
        return (request for group in self._groups for request in group.requests)

    def __len__(self) -> int:
        return len(self._group_of)

    def _may_join(self, group: Group, request: Request) -> bool:
        if group.behind is None:
            return True
        # Groups are in the order of their first requests: everyone overtaken has waited no longer than this one.
        return self._arranged and self.may_overtake(request, group.behind.first)

    def _append(self, expert: str) -> Group:
        group = self._last[expert] = Group(expert, before=self._end)
        self._groups[group] = None
        if self._end is not None:
            self._end.behind = group
        self._end = group
        return group

    def _drop(self, group: Group) -> None:
        del self._groups[group]
        if self._last[group.expert] is group:
            del self._last[group.expert]
        if group.before is not None:
            group.before.behind = group.behind
        if group.behind is not None:
            group.behind.before = group.before
        else:
            self._end = group.before

    def _remove(self, request: Request, group: Group) -> None:
        del group.requests[request], self._group_of[request]
        self._counts[request.expert] -= 1
        if not self._counts[request.expert]:
            del self._counts[request.expert]
        group.latency -= request.latency
        self.latency = self.latency - request.latency if self._group_of else 0.0  # no rounding error remains
        if not group.requests:
            self._drop(group)
