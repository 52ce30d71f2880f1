"""Steps of an engine taken one by one: timed, with a stride of one's choice, and what the ring recorded of them."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered

import jax
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.batch import Batch, StepOutput
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.packing import PassInputs
from jaxinfer.generation.execution.ring import RingDecoderPasses
from jaxinfer.sharding.schedules import Schedule, drained_stride, queued_stride

Stride = Callable[[int, int], int]
"""The ticks between two passes of a micro-batch, by stages and micro-batches."""
STRIDES: dict[str, Stride] = {"queued": queued_stride, "drained": drained_stride}
SPARE = 2
"""Tokens that a request may have beyond those of the measured steps, so that none ends in them."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The time of steps, and what came of them.

    Attributes:
      seconds: of the programs that ran, without scheduling.
      tokens: new ones of each sequence.
      ticks: int [ticks, stages, 3], what the stages worked on in the last step, as `RingDecoderPasses.recorded` has it;
        None without stages.
      count: how many steps.
    """

    seconds: float
    tokens: list[list[int]]
    ticks: np.ndarray | None
    count: int = 1

    @property
    def schedule(self) -> Schedule:
        """The schedule that the ring ran in the last step. Raises ValueError without stages."""
        if self.ticks is None:
            raise ValueError("Only a model in stages has a schedule.")
        return Schedule.from_ring(self.ticks.tolist())


def decode(llm: LLM, prompts: Ordered[list[int]], passes: int, stride: Stride) -> Steps:
    """Read prompts; then decode all of them in one step of so many passes, with a micro-batch for each stage.

    The engine does not overlap its steps, and the first page of each prompt has room for all its tokens.
    """
    engine, executor = llm.engine, _executor(llm)
    assert not executor.depth
    sequences = _begin(llm, prompts, passes + SPARE)
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step(1)
    stages = executor.state.layout.num_stages
    batch = dataclasses.replace(engine.scheduler.schedule(1), passes=passes, micro_batches=stages)
    commands = [_with_stride(command, stride, stages) for command in executor.commands(batch, [batch])]
    seconds, output = _take(executor, batch, commands)
    _end(llm, sequences)
    return Steps(seconds, [list(row.token_ids) for row in output.outputs], _ticks(executor))


def read_prompt(llm: LLM, prompt: list[int]) -> Steps:
    """Read one prompt, in as many steps as it takes, until its first token."""
    engine, executor = llm.engine, _executor(llm)
    sequences, tokens = _begin(llm, [prompt], SPARE), list[int]()
    seconds, count = 0.0, 0
    while not tokens:
        batch = engine.scheduler.schedule(1)
        step, output = _take(executor, batch, executor.commands(batch, [batch]))
        seconds, count = seconds + step, count + 1
        tokens = [token for part in output.outputs for token in part.token_ids]
        if not tokens:
            engine.scheduler.commit(batch, output)
    _end(llm, sequences)
    return Steps(seconds, [tokens], _ticks(executor), count)


def _executor(llm: LLM) -> DecoderExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, DecoderExecutor)
    return executor


def _begin(llm: LLM, prompts: Ordered[list[int]], tokens: int) -> list[Sequence]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    sequences = [sequence for prompt in prompts for sequence in llm.engine.prepare(prompt, params).sequences()]
    llm.engine.add(sequences)
    return sequences


def _end(llm: LLM, sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        llm.engine.abort(sequence.request_id)
    llm.engine.drain()


def _with_stride(command: Command, stride: Stride, stages: int) -> Command:
    """Return the command with another stride, which the same compiled ring runs; others as they are."""
    inputs = command.inputs
    if not isinstance(inputs, PassInputs) or (schedule := inputs.schedule) is None:
        return command
    ticks = np.int32(stride(stages, int(schedule.micro_batches)))
    return dataclasses.replace(command, inputs=inputs._replace(schedule=schedule._replace(stride=ticks)))


def _take(executor: DecoderExecutor, batch: Batch, commands: list[Command]) -> tuple[float, StepOutput]:
    """Run the commands of a batch; return the seconds until all results were there, and these."""
    jax.block_until_ready(executor.state.arrays)
    start = time.perf_counter()
    results = executor.run(commands)
    jax.block_until_ready([result.output for result in results])
    seconds = time.perf_counter() - start
    return seconds, executor.collect(InFlightStep(batch, ([batch], results), start))


def _ticks(executor: DecoderExecutor) -> np.ndarray | None:
    passes = executor.passes
    return passes.recorded() if isinstance(passes, RingDecoderPasses) else None
