"""Running batches of inputs on their experts' programs."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.experts.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert
from jaxinfer.experts.execution.place import Place
from jaxinfer.experts.results import Judgement
from jaxinfer.experts.scheduling.executor_state import ExecutorState
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Load


class ExpertRunner:
    """The device side of a system.

    Args:
      executors: the scheduler's executors.
      places: the devices of each.
      experts: the experts by name.
      programs: the programs by architecture and place.
      loader: holds the weights of the experts in each pool.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorState],
        places: Sequence[Place],
        experts: Mapping[str, OpenedExpert],
        programs: Mapping[tuple[Architecture, Place], ArchitecturePrograms],
        loader: ExpertLoader,
    ):
        self.loader = loader
        self._executors, self._places, self._experts, self._programs = executors, places, experts, programs

    def judge(self, batch: Batch, values: Sequence[np.ndarray | None]) -> list[Judgement]:
        """The answers of a batch; a value of None is judged as zeros."""
        expert, place = self._experts[batch.expert], self._places[batch.executor]
        kind = expert.kind
        inputs = [np.zeros(kind.shape, kind.dtype) if value is None else value for value in values]
        leaves = self.loader.leaves(self._executors[batch.executor].pool.index, batch.expert)
        outputs = self._programs[expert.architecture, place].run(leaves, inputs)
        return list(kind.judge(outputs, len(inputs)))

    def run_now(self, action: Action) -> Sequence[Judgement]:
        """Carry out an action now, with zeros as inputs: for a `Simulator` that really does everything.

        Returns a batch's answers.
        """
        match action:
            case Load():
                self.loader.prepare(action)()
            case Evict():
                self.loader.begin_eviction(action.pool, action.evictions, action.dropped)()
            case Batch():
                return self.judge(action, [None] * len(action.requests))
        return ()
