"""Schedules of a pipeline as data: which micro-batch each stage works on at each tick.

A tick is the time that a stage takes for one micro-batch; all stages begin a tick together. Micro-batch m enters the
first stage for its pass g at tick g * stride + m and goes on by one stage a tick (DeepSpeed Inference, section IV-C1).
The compiled ring asks `ring_job` with traced numbers what a stage works on, so it runs the same schedules.

`drained`, `queued`, `hybrid` and `chunked` make the schedules, all of them from the ring's arithmetic; `queued_idle`,
`drained_idle`, `queued_gain` and `chunk_speedup` say in closed form what they come to. P below is the number of stages,
M of micro-batches, G of passes: the tokens that each sequence gets.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from jaxinfer.fields import Size, check


def queued_stride(stages: int, micro_batches: int) -> int:
    """Compute the ticks between two passes of a micro-batch if generated tokens are queued (Fig. 2b).

    A micro-batch enters again as soon as its token has come back, and the first stage is free.
    """
    return max(stages, micro_batches)


def drained_stride(stages: int, micro_batches: int) -> int:
    """Compute the ticks between two passes of a micro-batch if the pipeline drains after each token (Fig. 2a)."""
    return micro_batches + stages - 1


def ring_ticks(stages: Any, micro_batches: Any, passes: Any, stride: Any) -> Any:
    """Return how many ticks all passes of all micro-batches take; arguments may be traced."""
    return (passes - 1) * stride + micro_batches + stages - 1


def ring_job(tick: Any, stage: Any, *, micro_batches: Any, passes: Any, stride: Any) -> tuple[Any, Any, Any]:
    """Return (micro-batch, pass, whether there is one) of a stage at a tick; arguments may be traced."""
    entered = tick - stage
    number, micro_batch = entered // stride, entered % stride
    return micro_batch, number, (entered >= 0) & (micro_batch < micro_batches) & (number < passes)


class Phase(enum.StrEnum):
    """Purpose of a pass: reading prompts, which makes the first token, or making one token more."""

    PROMPT = "prompt"
    GENERATION = "generation"


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of a stage in a tick.

    Attributes:
      micro_batch: its number; prompts and generation may be divided into different ones.
      phase: reading prompts, or generating.
      token: number of the token that the pass makes; 0 is made of the prompt.
      chunk: number of the part of the prompt that is read.
      units: how long it takes, in any unit that is the same for all jobs.
    """

    micro_batch: int
    phase: Phase
    token: int
    chunk: int = 0
    units: float = 1.0


def job_of_pass(micro_batch: int, number: int) -> Job:
    """The job of a ring whose first pass reads the prompts: pass g makes token g. Each takes one unit."""
    return Job(micro_batch, Phase.GENERATION if number else Phase.PROMPT, number)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Jobs of each stage at each tick, in order; a tick lasts as long as its longest job.

    Attributes:
      stages: how many there are.
      ticks: of each tick the stages' jobs; None where a stage is idle.
    """

    stages: int
    ticks: tuple[tuple[Job | None, ...], ...]

    def __post_init__(self) -> None:
        _check(stages=self.stages)
        for number, tick in enumerate(self.ticks):
            if len(tick) != self.stages:
                raise ValueError(
                    f"Schedule.ticks[{number}] has {len(tick)} jobs for {self.stages} stages; "
                    "give one for each stage, None for an idle one."
                )

    @classmethod
    def from_ring(
        cls, table: Iterable[Iterable[Iterable[int]]], make_job: Callable[[int, int], Job] = job_of_pass
    ) -> Self:
        """Make a schedule of what a ring did, or is to do.

        Args:
          table: integers [ticks, stages, 3]: micro-batch, pass, and 1 where there is a job, else 0.
          make_job: what a micro-batch and a pass are. In a ring that reads one prompt, micro-batches are chunks.

        Raises ValueError for a table without ticks, or of another shape.

        >>> Schedule.from_ring([[[0, 0, 1], [0, 0, 0]], [[0, 1, 0], [0, 0, 1]]]).idle_slots
        2
        """
        rows = [[tuple(int(number) for number in cell) for cell in tick] for tick in table]
        if not rows or any(len(cell) != 3 for tick in rows for cell in tick):
            raise ValueError(
                "Schedule.from_ring takes integers [ticks, stages, 3] with at least one tick: micro-batch, pass, "
                f"whether there is a job; got {len(rows)} ticks of {[len(cell) for tick in rows[:1] for cell in tick]}."
            )
        made = (tuple(make_job(cell[0], cell[1]) if cell[2] else None for cell in tick) for tick in rows)
        return cls(len(rows[0]), tuple(made))

    @property
    def slots(self) -> int:
        """Ticks times stages."""
        return len(self.ticks) * self.stages

    @property
    def idle_slots(self) -> int:
        """How many slots have no job: the bubble, if all ticks last equally long."""
        return sum(job is None for tick in self.ticks for job in tick)

    @property
    def durations(self) -> tuple[float, ...]:
        """The units that each tick lasts: those of its longest job; 0 for a tick without jobs."""
        return tuple(max((job.units for job in tick if job), default=0.0) for tick in self.ticks)

    @property
    def length(self) -> float:
        """The units that all ticks last, one after the other."""
        return math.fsum(self.durations)

    @property
    def utilisation(self) -> float:
        """The share of all stages' time in which they work, in [0, 1]."""
        return math.fsum(job.units for tick in self.ticks for job in tick if job) / (self.stages * self.length)

    @property
    def idle_share(self) -> float:
        """The share of all stages' time in which they wait: for a job, or for a longer job of the same tick."""
        return max(0.0, 1.0 - self.utilisation)  # of sums that are rounded

    def then(self, later: Self) -> Self:
        """A schedule: this one, followed by another one, which begins when all stages are idle."""
        if later.stages != self.stages:
            raise ValueError(
                f"Schedule.then: {later.stages} stages cannot follow {self.stages}; both need the same number."
            )
        return dataclasses.replace(self, ticks=self.ticks + later.ticks)


def drained(stages: int, micro_batches: int, tokens: int, *, prompt_units: float | None = None) -> Schedule:
    """The paper's baseline: no micro-batch begins a token before all have the one before (Fig. 2a).

    Args:
      stages: P.
      micro_batches: M.
      tokens: of each sequence; the first is made of the prompt.
      prompt_units: what a stage takes for all prompts together, which is divided evenly among the micro-batches, in
        units of a micro-batch's pass of generation. By default each micro-batch's prompts take one unit.

    Raises ValueError for a count below 1, or units that are not positive.
    """
    _check(stages=stages, micro_batches=micro_batches, tokens=tokens)
    stride = drained_stride(stages, micro_batches)
    return _ring(stages, micro_batches, tokens, stride, _jobs(micro_batches, prompt_units))


def queued(stages: int, micro_batches: int, tokens: int, *, prompt_units: float | None = None) -> Schedule:
    """Return dynamic queueing: each micro-batch goes on with its next token when it can (Fig. 2b).

    Arguments and errors as of `drained`.
    """
    _check(stages=stages, micro_batches=micro_batches, tokens=tokens)
    stride = queued_stride(stages, micro_batches)
    return _ring(stages, micro_batches, tokens, stride, _jobs(micro_batches, prompt_units))


def hybrid(
    stages: int,
    prompt_micro_batches: int,
    micro_batches: int,
    tokens: int,
    *,
    prompt_units: float | None = None,
) -> Schedule:
    """Return hybrid scheduling: prompts in one number of micro-batches, generation queued in another one (Fig. 3).

    All prompts are read before generation begins, since its micro-batches have other sequences together. The paper
    takes many for prompts, so that the bubble is small, and few for generation, where each reads all weights again.

    Args:
      stages: P.
      prompt_micro_batches: M of the prompts.
      micro_batches: M of generation.
      tokens: of each sequence; the first is made of the prompt.
      prompt_units: as of `drained`.

    Raises ValueError for a count below 1, or units that are not positive.
    """
    _check(stages=stages, prompt_micro_batches=prompt_micro_batches, micro_batches=micro_batches, tokens=tokens)
    prompts = queued(stages, prompt_micro_batches, 1, prompt_units=prompt_units)
    if tokens == 1:
        return prompts
    stride = queued_stride(stages, micro_batches)
    return prompts.then(_ring(stages, micro_batches, tokens - 1, stride, _generation))


def chunked(stages: int, units: Sequence[float]) -> Schedule:
    """Return chunks of one prompt that follow one another through the stages (SGLang's chunked pipeline).

    A stage has the keys and values of all chunks before, since they have passed it in order.

    Args:
      stages: P.
      units: what a stage takes for each chunk; equal ones leave the fewest idle (`chunk_sizes`).

    Raises ValueError without chunks, and for units that are not positive.
    """
    _check(stages=stages, chunks=len(units))
    for chunk, each in enumerate(units):
        _check_positive(f"units[{chunk}]", each)

    def make_job(chunk: int, _: int) -> Job:
        return Job(0, Phase.PROMPT, 0, chunk, float(units[chunk]))

    return _ring(stages, len(units), 1, queued_stride(stages, len(units)), make_job)


def chunk_sizes(prompt_tokens: int, chunks: int, *, per_token: float = 1.0, per_pair: float = 0.0) -> tuple[int, ...]:
    """The tokens of each chunk of a prompt such that all chunks take equally long.

    A token takes `per_token`, and `per_pair` for each token before it; the first x tokens then take
    per_token * x + per_pair * x² / 2, and chunk i ends where that is i / chunks of the whole. Sizes are whole, each
    within a token of that unless there must be at least one, and never grow.

    Args:
      prompt_tokens: of the whole prompt.
      chunks: how many there shall be, at most a chunk for each token.
      per_token: what a token takes alone, such as seconds.
      per_pair: what a token takes for each one before it, in the same unit.

    Raises ValueError for counts below 1, more chunks than tokens, and costs that are negative or both 0.

    >>> chunk_sizes(1000, 4)
    (250, 250, 250, 250)
    >>> chunk_sizes(1000, 4, per_token=1.0, per_pair=0.01)
    (457, 225, 172, 146)
    """
    _check(prompt_tokens=prompt_tokens, chunks=chunks)
    if chunks > prompt_tokens:
        raise ValueError(
            f"Schedule.chunks={chunks} is more than the prompt's {prompt_tokens} tokens; a chunk has at least one."
        )
    _check_costs(per_token, per_pair)
    unit = max(per_token, per_pair)  # costs may be so small that their squares are 0
    ends = [_tokens_within(i / chunks, prompt_tokens, per_token / unit, per_pair / unit) for i in range(chunks + 1)]
    # Equal ones may have been rounded to either side of a whole number: sorted, none is followed by a larger one.
    sizes = sorted((max(1, int(end - start)) for start, end in itertools.pairwise(ends)), reverse=True)
    while (left := prompt_tokens - sum(sizes)) < 0:  # there were chunks of less than a token
        sizes[sizes.count(sizes[0]) - 1] -= 1
    return tuple(size + (chunk < left) for chunk, size in enumerate(sizes))


def chunk_costs(sizes: Sequence[int], *, per_token: float = 1.0, per_pair: float = 0.0) -> tuple[float, ...]:
    """Return what each chunk of a prompt takes, by the costs of `chunk_sizes`, for `chunked`."""
    _check_costs(per_token, per_pair)
    context, costs = 0, []
    for tokens in sizes:
        costs.append(tokens * (per_token + per_pair * (context + tokens / 2)))
        context += tokens
    return tuple(costs)


def queued_idle(stages: int, micro_batches: int, passes: int) -> int:
    """Compute the idle slots of `queued`: P (P - 1), whatever G, if M >= P; fewer micro-batches leave more."""
    return stages * (stages - 1) + stages * (passes - 1) * max(0, stages - micro_batches)


def drained_idle(stages: int, passes: int) -> int:
    """Compute the idle slots of `drained`: G P (P - 1)."""
    return passes * stages * (stages - 1)


def queued_gain(stages: int, passes: int) -> float:
    """Return how many times as fast `queued` is as `drained` with M = P: (2P - 1) / P * GP / (GP + P - 1)."""
    return (2 * stages - 1) * passes / (passes * stages + stages - 1)


def chunk_speedup(stages: int, chunks: int) -> float:
    """Return how many times as fast P stages are as one device, for a prompt in c equal chunks: c P / (c + P - 1)."""
    return chunks * stages / (chunks + stages - 1)


def _ring(stages: int, micro_batches: int, passes: int, stride: int, make_job: Callable[[int, int], Job]) -> Schedule:
    ticks = range(ring_ticks(stages, micro_batches, passes, stride))
    sizes = {"micro_batches": micro_batches, "passes": passes, "stride": stride}
    table = ((ring_job(tick, stage, **sizes) for stage in range(stages)) for tick in ticks)
    return Schedule.from_ring(table, make_job)


def _jobs(micro_batches: int, prompt_units: float | None) -> Callable[[int, int], Job]:
    if prompt_units is None:
        return job_of_pass
    _check_positive("prompt_units", prompt_units)
    units = prompt_units / micro_batches

    def make_job(micro_batch: int, number: int) -> Job:
        job = job_of_pass(micro_batch, number)
        return job if number else dataclasses.replace(job, units=units)

    return make_job


def _generation(micro_batch: int, number: int) -> Job:
    return Job(micro_batch, Phase.GENERATION, number + 1)


def _tokens_within(share: float, prompt_tokens: int, per_token: float, per_pair: float) -> float:
    """Compute the number of tokens, a fraction, that take a share of the prompt's time."""
    time = share * (per_token * prompt_tokens + per_pair * prompt_tokens**2 / 2)
    # The positive root of per_token * x + per_pair * x² / 2 = time, in the form that holds without per_pair.
    return 2 * time / (per_token + math.sqrt(per_token**2 + 2 * per_pair * time)) if time else 0.0


def _check(**counts: int) -> None:
    for name, count in counts.items():
        check(f"Schedule.{name}", count, Size)


def _check_positive(name: str, number: float) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"Schedule.{name} must be a positive number, got {number!r}.")


def _check_costs(per_token: float, per_pair: float) -> None:
    if not (0 <= per_token < math.inf and 0 <= per_pair < math.inf and per_token + per_pair > 0):
        raise ValueError(
            f"Schedule.per_token={per_token!r} and per_pair={per_pair!r} must be >= 0, and one of them above 0."
        )
