"""The ring of stages as one of its devices sees it: its stage, the ticks of a step, and the end of the pipeline.

At each tick a stage runs its layers over one micro-batch and hands the activations to the next stage. The last stage
chooses tokens at the end of its ticks (`Tick.at_end`), and all stages learn them when the step ends (`share_last`).
Arrays of rows and chunks are divided by micro-batch (`Pipeline.split`).

Dimensions beside those of `programs`: M micro-batches, of which each has B / M rows.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.execution.programs.chain import run_layers
from jaxinfer.generation.execution.state import Slots
from jaxinfer.models import Cache, LayerAdapters, TokenRows
from jaxinfer.models.stages import Stages
from jaxinfer.sharding.collectives import from_last
from jaxinfer.sharding.schedules import drained_stride, ring_job, ring_ticks

if TYPE_CHECKING:
    from jaxinfer.models import Decoder

AXIS = "stages"


class RingSchedule(NamedTuple):
    """The schedule of a step.

    Attributes:
      micro_batches: int32 [], those that are not empty, the first ones.
      passes: int32 [], of each of them.
      stride: int32 [], the ticks between two passes of a micro-batch.
    """

    micro_batches: jax.Array
    passes: jax.Array
    stride: jax.Array


class PipelineStage(NamedTuple):
    """The part of a model that this device has.

    Attributes:
      model: its layers by position, and all that is there once.
      adapters: of its layers.
      number: int32 [], from 0.
      stages: the layers of all stages.
    """

    model: "Decoder"
    adapters: list[LayerAdapters] | None
    number: jax.Array
    stages: Stages

    @property
    def is_first(self) -> jax.Array:
        return self.number == 0

    @property
    def is_last(self) -> jax.Array:
        return self.number == self.stages.count - 1

    def enter(self, x: jax.Array, groups: tuple[TokenRows, ...]) -> jax.Array:
        """Compute the embeddings of tokens on the first stage, on the others x, which came from the stage before."""
        with jax.named_scope("first_stage"):
            return lax.cond(self.is_first, lambda: self.model.enter(groups)[0], lambda: x)

    def run(
        self, x: jax.Array, groups: tuple[TokenRows, ...], caches: list[Cache], *, speculates: bool = False
    ) -> tuple[jax.Array, list[Cache]]:
        """Run the layers that this stage has, [N, D] -> [N, D], and return their caches with what they wrote.

        speculates: as in `ForwardContext`.
        """
        new_caches = list(caches)
        for position, place in enumerate(self.model.cfg.cache_places):
            cache = new_caches[place]
            adapters = None if self.adapters is None else self.adapters[position : position + 1]

            def layer(x, cache, position=position, adapters=adapters):
                options = {"layers": range(position, position + 1), "speculates": speculates}
                x, caches = run_layers(self.model, adapters, [cache], x, groups, **options)
                assert caches is not None
                return x, caches[0]

            there = self.stages.there(position)
            if all(there):
                x, cache = layer(x, cache)
            else:
                with jax.named_scope("some_stages"):
                    x, cache = lax.cond(jnp.array(there)[self.number], layer, lambda x, cache: (x, cache), x, cache)
            new_caches[place] = cache
        return x, new_caches

    def embedded(self, groups: tuple[TokenRows, ...]) -> jax.Array:
        """Return zeros in the shape of activations."""
        shape = jax.eval_shape(lambda: self.model.enter(groups)[0])
        return jnp.zeros(shape.shape, shape.dtype)


class Tick(NamedTuple):
    """The work of a stage at a tick.

    Attributes:
      number: int32 [], of the tick.
      at: int32 [], the stage's micro-batch.
      active: bool [], whether there is any.
      is_end: bool [], whether this is the last stage, and there is.
    """

    number: jax.Array
    at: jax.Array
    active: jax.Array
    is_end: jax.Array

    @classmethod
    def of_first(cls) -> "Tick":
        """The work of a stage that is first and last, on the first micro-batch: for shapes."""
        zero = jnp.zeros((), jnp.int32)
        return cls(zero, zero, jnp.array(True), jnp.array(True))

    def part[T](self, tree: T) -> T:
        """Take the micro-batch's part of arrays that are divided; scalars are for all."""
        return jax.tree.map(lambda x: x[self.at] if x.ndim else x, tree)

    def put[T](self, tree: T, new: T) -> T:
        """Put what the last stage has of the micro-batch into divided arrays; elsewhere they stay."""
        return jax.tree.map(lambda x, y: x.at[jnp.where(self.is_end, self.at, len(x))].set(y, mode="drop"), tree, new)

    def at_end[T](self, chosen: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Compute what the last stage makes of its micro-batch, if it has one; elsewhere the other."""
        with jax.named_scope("last_stage"):
            return lax.cond(self.is_end, chosen, otherwise)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline of a step, on the device of one stage.

    Attributes:
      stage: the device's.
      schedule: which micro-batch is where at a tick.
      micro_batches: M, with the empty ones.
    """

    stage: PipelineStage
    schedule: RingSchedule
    micro_batches: int

    def run[T](
        self, run_tick: Callable[[Tick, T], T], state: T, *, passes: jax.Array | int, max_passes: int
    ) -> tuple[T, jax.Array]:
        """Run all ticks of a step.

        Args:
          run_tick: computes the state after a tick, from the stage's work and the state before.
          state: the state before the first tick.
          passes: how many there are, at most `max_passes`.

        Returns the state after the last tick, and what the stage has worked on: int32 [ticks, 3], micro-batch, pass,
        and whether there was any. There is room for the ticks of any schedule.
        """
        count, schedule = self.stage.stages.count, self.schedule

        def turn(number: jax.Array, carry: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
            tick, job = self._work(number)
            return run_tick(tick, carry[0]), carry[1].at[number].set(job)

        room = ring_ticks(count, self.micro_batches, max_passes, drained_stride(count, self.micro_batches))
        jobs = jnp.zeros((room, 3), jnp.int32)
        ticks = ring_ticks(count, schedule.micro_batches, passes, schedule.stride)
        return lax.fori_loop(0, ticks, turn, (state, jobs))

    def _work(self, number: jax.Array) -> tuple[Tick, jax.Array]:
        """The stage's work at a tick, and its record: int32 [3]."""
        at, passed, active = ring_job(number, self.stage.number, **self.schedule._asdict())
        job = jnp.stack([at, passed, active.astype(jnp.int32)])
        return Tick(number, jnp.minimum(at, self.micro_batches - 1), active, active & self.stage.is_last), job

    def returned(self, tick: Tick) -> jax.Array:
        """The micro-batch that the last stage has just handed to the first: int32 []; M on others, or without any."""
        last = self.stage.stages.count - 1
        at, _, active = ring_job(tick.number - 1, last, **self.schedule._asdict())
        return jnp.where(self.stage.is_first & active, at, self.micro_batches)

    def split[T](self, tree: T) -> T:
        """Divide the first dimension of arrays by micro-batch: [M * N, ...] -> [M, N, ...]; scalars are for all."""
        return jax.tree.map(lambda x: x.reshape(self.micro_batches, -1, *x.shape[1:]) if x.ndim else x, tree)


def joined[T](tree: T) -> T:
    """Join the parts of micro-batches again: [M, N, ...] -> [M * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def share_last(slots: Slots, slot: jax.Array, start: jax.Array, width: int) -> Slots:
    """Have all stages know what the last one knows of some slots.

    Args:
      slot: int32 [R].
      start: int32 [R], the first token that the others may not know.
      width: how many tokens that are; the length is the other thing.
    """
    index = start[:, None] + jnp.arange(width)
    tokens = slots.history.at[slot[:, None], index].get(mode="fill", fill_value=0)
    known = from_last(jnp.concatenate([tokens, slots.length[slot][:, None]], axis=1), AXIS)
    history = slots.history.at[slot[:, None], index].set(known[:, :-1], mode="drop")
    return slots._replace(history=history, length=slots.length.at[slot].set(known[:, -1]))
