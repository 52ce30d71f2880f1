"""A scheduler's decisions, recorded and replayed without deciding (the paper's "pre-scheduled" inference)."""

import dataclasses
from collections import deque
from typing import Any

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class _RecordedBatch:
    expert: str
    requests: tuple[tuple[int, int], ...]  # number of the input, in the order of submission, and stage


class Recorder(Scheduler):
    """Scheduler that records its actions; for arguments see `Scheduler`, without prefetch and shared pools.

    Attributes:
      recording: each executor's loads and batches in order.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.policy.prefetch or self.policy.share_pools:
            raise ConfigError(
                "a recording needs a policy without prefetch and shared pools: one thing after the other."
            )
        self.recording: list[list[Load | _RecordedBatch]] = [[] for _ in self.executors]

    def poll(self, now: float) -> list[Action]:
        """Record the actions of `Scheduler.poll`, and return them."""
        actions = super().poll(now)
        for action in actions:
            match action:
                case Load():
                    self.recording[action.executor].append(action)
                case Batch():
                    requests = tuple((request.id, request.stage) for request in action.requests)
                    self.recording[action.executor].append(_RecordedBatch(action.expert, requests))
                case Evict() | Failure():
                    raise ConfigError("a recording cannot have failures, or batches that experts make room for.")
        return actions


class Replayer(Scheduler):
    """Scheduler that replays a recording as soon as its requests are there; for other arguments see `Recorder`.

    Args:
      recording: a recording of the same system and inputs.
    """

    def __init__(self, *args: Any, recording: list[list[Load | _RecordedBatch]], **options: Any):
        super().__init__(*args, **options)
        self._left = [deque(items) for items in recording]
        self._waiting: dict[tuple[int, int], Request] = {}
        self._busy = [False] * len(recording)

    def admit(self, request: Request, now: float) -> int:
        """Note that a request has arrived."""
        self._waiting[request.id, request.stage] = request
        return 0

    def poll(self, now: float) -> list[Action]:
        """The next recorded action of each idle executor, if its requests are there."""
        actions: list[Action] = []
        for index, left in enumerate(self._left):
            if self._busy[index] or not left:
                continue
            item = left[0]
            if isinstance(item, _RecordedBatch):
                if not all(key in self._waiting for key in item.requests):
                    continue
                item = Batch(index, item.expert, [self._waiting.pop(key) for key in item.requests], now)
                self.statistics.batches += 1
                self.statistics.requests += len(item.requests)
            else:
                self.statistics.loads[item.tier] += 1
            left.popleft()
            self._busy[index] = True
            actions.append(item)
        return actions

    def loaded(self, load: Load, now: float, error: Exception | None = None) -> list[Failure]:
        """Note that a load has ended."""
        if error is not None:
            raise error
        self._busy[load.executor] = False
        return []

    def executed(self, batch: Batch, now: float, error: Exception | None = None) -> list[Failure]:
        """Note that a batch has ended."""
        if error is not None:
            raise error
        self._busy[batch.executor] = False
        return []
