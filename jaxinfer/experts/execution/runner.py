"""Running batches of inputs on their experts' programs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.experts.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.experts.execution.kinds import Judgement
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert, is_out_of_memory
from jaxinfer.experts.scheduling.executor_state import ExecutorState
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Load

log = logging.getLogger(__name__)


class ExpertRunner:
    """The device side of a system.

    Args:
      executors: the scheduler's executors.
      devices: the device of each.
      experts: the experts by name.
      programs: the programs by architecture and device.
      loader: holds the weights of the experts in each pool.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorState],
        devices: Sequence[Any],
        experts: Mapping[str, OpenedExpert],
        programs: Mapping[tuple[Architecture, Any], ArchitecturePrograms],
        loader: ExpertLoader,
    ):
        self.loader = loader
        self._executors, self._devices, self._experts, self._programs = executors, devices, experts, programs

    def judge(self, batch: Batch, values: Sequence[np.ndarray | None]) -> list[Judgement]:
        """The answers of a batch; a value of None is judged as zeros.

        If the device has too little memory, the batch runs in halves.
        """
        kind = self._experts[batch.expert].kind
        inputs = [np.zeros(kind.shape, kind.dtype) if value is None else value for value in values]
        try:
            return self._judge(batch, inputs)
        except Exception as error:
            if not is_out_of_memory(error) or len(inputs) == 1:
                raise
            log.warning("a batch of %d does not fit the device; it runs in halves", len(inputs))
        half = len(inputs) // 2
        return self._judge(batch, inputs[:half]) + self._judge(batch, inputs[half:])

    def _judge(self, batch: Batch, inputs: Sequence[np.ndarray]) -> list[Judgement]:
        expert, device = self._experts[batch.expert], self._devices[batch.executor]
        leaves = self.loader.leaves(self._executors[batch.executor].pool.index, batch.expert)
        outputs = self._programs[expert.architecture, device].run(leaves, inputs)
        return list(expert.kind.judge(outputs, len(inputs)))

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
