"""Batches through a stateless model: padded to one of few sizes, and run by the program of that size."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer.compiled import Costs, DeviceTime, ExecutableStore, Program, ProgramCache, ProgramSpec, Sizes
from jaxinfer.compiled.background import Turns
from jaxinfer.models.devices import run_on
from jaxinfer.sharding import ShardingRules
from jaxinfer.sizes import powers, round_up

log = logging.getLogger(__name__)

type Inputs = np.ndarray | Sequence[Any]
"""An array whose first dimension is the batch, or a list of arrays or numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSize(Sizes):
    """A program for batches of `batch` inputs."""

    batch: int


def batch_sharding(mesh: Mesh | None, rules: ShardingRules) -> NamedSharding | None:
    """The sharding of arrays whose first dimension is the batch, of which each lane has a part; None: one device."""
    return None if mesh is None else NamedSharding(mesh, rules.spec("batch", mesh=mesh))


class Forward[S: BatchSize]:
    """The programs of a stateless model on its devices, one for each size of a batch.

    Args:
      spec: the programs. They take arrays that belong to no input, such as weights, and then arrays whose first
        dimension is the batch.
      max_batch: inputs of the largest batch in each lane; smaller ones have powers of two as sizes.
      mesh: the devices that programs are divided over; None: one device.
      lanes: how many groups of these devices have different inputs.
      kernels: whether operations may run as kernels.
      store: where executables are kept between processes; None: nowhere.
      turns: as of `ProgramCache`.
      costs: the record to which the time of each batch is added; None: none.

    Attributes:
      cache: the executables.
      mesh: as given.
      sizes: the sizes that batches are padded to, ascending, compiled or not.
    """

    def __init__(
        self,
        spec: ProgramSpec[S, Iterable[int]],
        *,
        max_batch: int,
        mesh: Mesh | None = None,
        lanes: int = 1,
        kernels: bool = True,
        store: ExecutableStore | None = None,
        turns: Turns | None = None,
        costs: Costs | None = None,
    ):
        self._spec, self._costs, self._time, self.mesh = spec, costs, DeviceTime(), mesh
        self.cache: ProgramCache[Iterable[int]] = ProgramCache(
            [spec], mesh=mesh, kernels=kernels, store=store, turns=turns
        )
        self.sizes = batch_sizes(max_batch, lanes)

    def program(self, batch: int) -> Program:
        """The program of this size, compiled if need be."""
        return self.cache.get(self._spec.sizes(batch=batch))

    def is_compiled(self, batch: int) -> bool:
        """Check whether the program of this size is there."""
        return self._spec.sizes(batch=batch) in self.cache

    def workspace_bytes(self, batch: int) -> int:
        """The bytes that a batch of this size takes on top of its arguments."""
        return self.program(batch).memory.workspace_bytes

    def launch(self, arguments: Sequence[Any], *inputs: Inputs, sizes: Sequence[int] | None = None) -> "LaunchedBatch":
        """Send a batch to the device, without waiting for it.

        Args:
          arguments: what belongs to no input, on the device.
          inputs: what the batch consists of, padded with zeros.
          sizes: ascending, to which it may be padded; None: all.

        Raises ValueError for more inputs than the largest size.
        """
        batch = LaunchedBatch(self, arguments, inputs, sizes or self.sizes, self._time.clock())
        try:
            batch.send()
        except Exception as error:
            check_halves(error, batch.count)
        return batch

    def run(self, arguments: Sequence[Any], *inputs: Inputs) -> Any:
        """Run a batch and wait for it, as `launch` and `LaunchedBatch.result` do."""
        return self.launch(arguments, *inputs).result()

    def record(self, batch: int, sent: float, *, at_most: bool) -> None:
        """Add the time of a batch, whose results have just arrived, to the record."""
        if self._costs is not None:
            seconds = self._time.end(sent).seconds
            self._costs.record(self._spec.name, self._spec.sizes(batch=batch).bucket, seconds, at_most=at_most)


@dataclasses.dataclass
class LaunchedBatch:
    """A batch on the device; made by `Forward.launch`."""

    forward: Forward[Any]
    arguments: Sequence[Any]
    inputs: Sequence[Inputs]
    sizes: Sequence[int]
    sent: float
    outputs: Any = None

    @property
    def count(self) -> int:
        """The number of inputs."""
        return len(self.inputs[0])

    @property
    def size(self) -> int:
        """The size that it is padded to."""
        return round_up(self.count, self.sizes)

    def send(self) -> None:
        """Send the batch to the device."""
        program, inputs = self.forward.program(self.size), [_padded(x, self.size) for x in self.inputs]
        self.outputs = run_on(self.forward.mesh, program, *self.arguments, *inputs)

    def result(self) -> Any:
        """Wait for the batch; return its outputs as arrays of the host, without those of padding.

        If the device has too little memory, the batch runs in halves. Raises JaxRuntimeError if these do not fit.
        """
        if self.outputs is not None:
            late = all(x.is_ready() for x in jax.tree.leaves(self.outputs))
            try:
                outputs = self.on_host()
            except Exception as error:
                check_halves(error, self.count)
            else:
                self.forward.record(self.size, self.sent, at_most=late)
                return outputs
        self.outputs, done = None, []
        for part in halves(self.count):
            batch = dataclasses.replace(self, inputs=[x[part] for x in self.inputs])
            batch.send()
            done.append(batch.on_host())
        return jax.tree.map(lambda *parts: np.concatenate(parts), *done)

    def on_host(self) -> Any:
        """Wait for the outputs; return them as arrays of the host, without those of padding."""
        return jax.tree.map(lambda x: np.asarray(x)[: self.count], self.outputs)


def batch_sizes(max_batch: int, lanes: int) -> tuple[int, ...]:
    """The sizes that batches are padded to, ascending: powers of two, and `max_batch`, in each lane."""
    return tuple(lanes * size for size in powers(2, 1, max_batch))


def halves(count: int) -> tuple[slice, slice]:
    """The halves of a batch that does not fit the device."""
    log.warning("A batch of %d does not fit the device; it runs in halves.", count)
    return slice(None, count // 2), slice(count // 2, None)


def check_halves(error: Exception, count: int) -> None:
    """Raise the error of a batch of `count` unless it may fit the device in halves."""
    if count == 1 or not is_out_of_memory(error):
        raise error


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether a device or the host ran out of memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    )


def _padded(x: Inputs, size: int) -> np.ndarray:
    """Stack inputs in an array, with zeros up to the size of a program."""
    if isinstance(x, np.ndarray) and len(x) == size:
        return x
    first = np.asarray(x[0])
    padded = np.zeros((size, *first.shape), first.dtype)
    padded[: len(x)] = x
    return padded
