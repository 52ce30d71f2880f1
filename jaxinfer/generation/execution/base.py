"""The base of all executors: programs, and the record of their costs."""

from collections.abc import Iterable
from typing import Any

import jax

from jaxinfer.compiled import Clock, Costs, DeviceTime, ExecutableStore, ProgramCache, ProgramSpec
from jaxinfer.generation.engine.config import SharedConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.execution.platforms import can_overlap
from jaxinfer.models.files.loading import LoadedModel


class BaseExecutor[Buckets]:
    """Programs and times of a model on its devices.

    Args:
      model: weights and config.
      config: the engine's sizes.
      specs: the programs.
      clock: the engine's clock.
      costs: the record of the programs' times, to which every step is added.

    Attributes:
      store: where executables are kept between processes.
      programs: all executables.
      depth: as in `Executor`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: SharedConfig,
        specs: Iterable[ProgramSpec[Any, Buckets]],
        clock: Clock,
        costs: Costs,
    ):
        self._overlaps = can_overlap(model)
        self.config, self.depth, self.costs = config, int(config.overlap and self._overlaps), costs
        self.store = ExecutableStore()
        self.programs = ProgramCache(specs, mesh=model.mesh, kernels=config.kernels, store=self.store)
        self._clock, self._device = clock, DeviceTime(clock)

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the largest program compiled so far, on each device."""
        return max((program.memory.workspace_bytes for program in self.programs), default=0)

    def _in_turn[Result](self, result: Result) -> Result:
        """Return the result; blocks until it is ready on platforms where two programs must not run at once."""
        return result if self._overlaps else jax.block_until_ready(result)

    def _seconds(self, step: InFlightStep) -> float:
        """Return how long a step took whose results have just arrived, as `Costs` defines it."""
        return self._device.end(step.launched).seconds

    def restart(self) -> None:
        """Start over, as in `Executor`; programs and costs stay as they are."""

    def interrupt(self) -> None:
        """End a wait for a disk, as in `Executor`; there is none here."""
