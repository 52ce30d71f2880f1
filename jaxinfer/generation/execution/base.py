"""The base of executors: programs on the devices, the record of their costs, and the protocol of passes."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax

from jaxinfer.compiled import Clock, Costs, DeviceTime, ProgramCache, ProgramSpec, Sizes, executable_store
from jaxinfer.generation.engine.batch import Batch, PageBlock, StateBlock
from jaxinfer.generation.engine.config import SharedConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.stats import ExecutorReport
from jaxinfer.models.devices import can_overlap, is_divided, run_on
from jaxinfer.models.files.loading import LoadedModel


class DevicePrograms[Buckets]:
    """The programs of a model on its devices.

    Args:
      model: weights and config.
      config: the engine's sizes.
      specs: the programs.

    Attributes:
      cache: all executables.
      overlap: whether a program may be sent while another one runs.
    """

    def __init__(self, model: LoadedModel, config: SharedConfig, specs: Iterable[ProgramSpec[Any, Buckets]]):
        self.overlap = can_overlap(model.mesh)
        self._mesh, self._is_divided, self._store = model.mesh, is_divided(model.mesh), executable_store()
        self.cache = ProgramCache(specs, mesh=model.mesh, kernels=config.kernels, store=self._store)

    def compile(self, spec: ProgramSpec[Any, Any], sizes: Sizes) -> Any:
        """Compile a program that is called in between, and not kept with the others."""
        return spec.compile(sizes, mesh=self._mesh, store=self._store)

    def run(self, sizes: Sizes, *arguments: Any) -> Any:
        """Call the program of these sizes; blocks until it is done on platforms where two must not run at once."""
        program = self.cache.get(sizes)
        return run_on(self._mesh, program, *arguments) if self._is_divided else program(*arguments)


class Passes(Protocol):
    """Sends passes through the layers of a model to its devices."""

    @property
    def overlap(self) -> bool:
        """Whether a pass is sent without waiting for any part of it."""
        ...

    def report(self) -> ExecutorReport:
        """Return what they have done so far, apart from the programs' workspace."""
        ...

    def finish(self) -> None:
        """Wait for the passes that were sent."""
        ...

    def restart(self) -> None:
        """Give up what was sent, and begin with the first layer."""
        ...

    def interrupt(self) -> None:
        """End a pass that waits for a disk, with an error; from any thread, when no other is to follow."""
        ...


class WholePasses:
    """The base of passes in one program each, whose layers are all on the devices."""

    overlap = True

    def report(self) -> ExecutorReport:
        """Return an empty report: they have neither stages nor layers on their way."""
        return ExecutorReport()

    def finish(self) -> None:
        """Wait for nothing: whoever reads the results does."""

    def restart(self) -> None:
        """Do nothing: there is nothing on its way."""

    def interrupt(self) -> None:
        """Do nothing: there is no wait for a disk."""


class BaseExecutor[Buckets]:
    """Programs, passes and times of a model on its devices.

    Args:
      programs: the programs.
      passes: sends passes to the devices.
      config: the engine's sizes.
      clock: the engine's clock.
      costs: the record of the programs' times, to which every step is added.

    Attributes:
      depth: as in `Executor`.
      costs: as in `Executor`.
      device: the programs.
    """

    def __init__(
        self, programs: DevicePrograms[Buckets], passes: Passes, config: SharedConfig, clock: Clock, costs: Costs
    ):
        self.device, self.costs, self._passes = programs, costs, passes
        self.depth = int(config.overlap and programs.overlap and passes.overlap)
        self._clock, self._time = clock, DeviceTime(clock)

    @property
    def programs(self) -> ProgramCache[Buckets]:
        """All executables."""
        return self.device.cache

    def report(self) -> ExecutorReport:
        """Return what it has needed and done so far."""
        workspace = max((program.memory.workspace_bytes for program in self.programs), default=0)
        return self._passes.report()._replace(workspace_bytes=workspace)

    def restart(self) -> None:
        """Start over, as in `Executor`; programs and costs stay as they are."""
        self._passes.restart()

    def read_pages(self, batch: Batch) -> list[list[PageBlock | StateBlock]]:
        """Bring no page to the host, as an encoder has none."""
        return []

    def interrupt(self) -> None:
        """End a wait for a disk, and compiling, as in `Executor`."""
        self.programs.turns.stop()
        self._passes.interrupt()

    def _is_late(self, outputs: Any) -> bool:
        """Return whether a step's results had come before they are waited for, while the host did something else."""
        return bool(self.depth) and not [x for x in jax.tree.leaves(outputs) if not x.is_ready()]

    def _seconds(self, step: InFlightStep) -> float:
        """Return how long a step took whose results have just arrived, as `Costs` defines it."""
        return self._time.end(step.launched).seconds


def send_to_host(outputs: Sequence[Any]) -> None:
    """Begin to copy results to the host."""
    for array in jax.tree.leaves(outputs):
        array.copy_to_host_async()
