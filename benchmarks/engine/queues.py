"""The host's work for many requests at once: CPU time of the engine itself, with a device that answers instantly."""

import asyncio
import functools
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from benchmarks.engine.settings import Settings
from benchmarks.report import Report
from jaxinfer import PoolingParams, SamplingParams
from jaxinfer.compiled import Costs, ProgramCache
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.engine.batch import Batch, PageBlock, SequenceOutput, StateBlock, StepOutput
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, SharedConfig
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.generation.engine.encoder_scheduler import EncoderScheduler
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.protocols import Executor, InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.stats import ExecutorReport
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.execution.decoder import PassResult
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.packing import Packer
from jaxinfer.generation.execution.programs.decode import DecodeOutput
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.prefill import PrefillOutput
from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.files.description import Description, SentenceConfig
from jaxinfer.serving import ClosedError
from jaxinfer.serving.loop import Loop
from jaxinfer.serving.ticket import Reader
from jaxinfer.text import Tokenizer

STREAMS, PROMPT, STEPS = 256, 32_000, 64
FEW, MANY = 2_000, 20_000
ROUNDS = 5
VOCAB = 256  # of prompts: every model has as many
TOKEN = 200  # the device's constant answer
VECTOR = np.ones(8, np.float32)


class InstantExecutor:
    """The device side of an engine without a device: an answer is ready as soon as it is asked for.

    Attributes:
      open: while it is not set, a launch waits.
      launches: number of sequences that each step decodes, and the CPU time of the engine's thread before it.
    """

    depth, chunk_seconds = 1, None

    def __init__(self, costs: Costs):
        self.programs: ProgramCache[Any] = ProgramCache([])
        self.costs = costs
        self.open = threading.Event()
        self.open.set()
        self.launches: list[tuple[int, float]] = []

    def report(self) -> ExecutorReport:
        """Return an empty report."""
        return ExecutorReport()

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile nothing."""
        return 0

    def launch(self, batch: Batch) -> InFlightStep:
        """Do the host's work of sending a batch."""
        self.open.wait()
        self.launches.append((len(batch.rows), time.thread_time()))
        return InFlightStep(batch, self._answer(batch), 0.0)

    def _answer(self, batch: Batch) -> Any:
        raise NotImplementedError

    def collect(self, step: InFlightStep) -> StepOutput:
        """Collect the answer."""
        raise NotImplementedError

    def wait(self, step: InFlightStep) -> None:
        """Do nothing: answers are there."""

    def read_pages(self, batch: Batch) -> list[list[PageBlock | StateBlock]]:
        """Bring no page to the host."""
        return []

    def free_state(self) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing: the device holds nothing."""

    def sleep(self) -> None:
        """Do nothing: the device holds nothing."""

    def wake_up(self, leaves: list[Any]) -> None:
        """Do nothing: the device holds nothing."""

    def compile_in_background(self) -> None:
        """Do nothing: there are no programs."""

    def interrupt(self) -> None:
        """Do nothing: no thread waits for a disk."""


class InstantDecoder(InstantExecutor):
    """Executor that packs batches and reads results as a decoder's executor does.

    Attributes:
      answers: the tokens that a row gets, one in each step, again and again.
    """

    def __init__(self, layout: DeviceLayout, buckets: Buckets, costs: Costs):
        super().__init__(costs)
        self._packer = Packer(layout, buckets, ())
        self.answers = [TOKEN]

    def _answer(self, batch: Batch) -> Any:
        self._packer.changes(batch)
        sizes, nothing = cast(Pass, self._packer.pass_through(batch).sizes), cast(Any, None)
        places: Any = np.arange(len(self.launches), len(self.launches) + sizes.chunks + sizes.batch)
        tokens = np.take(self.answers, places, mode="wrap")
        if not sizes.chunks:
            counts: Any = np.zeros(sizes.batch, np.int32)
            output = DecodeOutput(tokens[:, None], counts + 1, nothing, counts, counts, nothing)
        else:
            output = PrefillOutput(tokens, tokens > 0, nothing, nothing, nothing)
        return PassResult("instant", sizes.bucket, sizes, output)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Return a token for every row."""
        return StepOutput(outputs=step.output.read(step.batch, step.output.output))


class InstantEncoder(InstantExecutor):
    """Executor that returns the same vector for every text."""

    def _answer(self, batch: Batch) -> Any:
        return [SequenceOutput(embedding=VECTOR)] * len(batch.chunks)

    def collect(self, step: InFlightStep) -> StepOutput:
        return StepOutput(outputs=step.output)


def decoder_engine(folder: Path, *, num_pages: int, **config: Any) -> Engine:
    """Make an engine with the tokenizer of a model directory, and a device of its shapes that answers instantly."""
    description = Description.read(folder)
    assert isinstance(description.config, DecoderConfig)
    engine = EngineConfig(max_decode_passes=1, **config)
    buckets, costs = Buckets.from_config(engine), Costs.fixed({})
    layout = DeviceLayout(description.config, WeightFormat(), engine, num_pages=num_pages, platform="cpu")
    passes = PassCosts(costs, engine.num_speculative_tokens)
    scheduler = DecoderScheduler(engine, buckets, PagePool(num_pages, engine.page_size), costs=passes)
    executor = InstantDecoder(layout, buckets, costs)
    return make_engine(engine, folder, description.config.vocab, scheduler, executor, generates=True)


def encoder_engine(folder: Path) -> Engine:
    """Make an encoder's engine whose device answers instantly."""
    engine = EncoderEngineConfig(max_batch=32, context=512)
    scheduler = EncoderScheduler(engine, EncoderBuckets.from_config(engine))
    return make_engine(engine, folder, VOCAB, scheduler, InstantEncoder(Costs.fixed({})), generates=False)


def make_engine(
    config: SharedConfig, folder: Path, vocab: int, scheduler: Any, executor: Executor, *, generates: bool
) -> Engine:
    """Make an engine of these parts."""
    inputs = InputProcessor(
        vocab=vocab,
        eos_ids=(),
        context=config.context,
        tokenizer=Tokenizer.from_folder(folder),
        generates=generates,
        sentence=SentenceConfig(),
    )
    return Engine(config, inputs, scheduler, executor)


# Many streams


async def read(pending: RequestTicket) -> None:
    """Make all outputs of a request that its task sees."""
    assert pending.reader is not None
    while pending.outcome is None:
        await pending.reader.wait()
        if pending.reader.newest is not None:
            pending.reader.newest.output()


def host_ms(folder: Path, *, streams: int, prompt: int, steps: int) -> list[float]:
    """Measure the engine thread's CPU milliseconds for each step in which all streams grow by a token."""
    config = {"max_batch": streams, "context": prompt + steps, "chunk_size": prompt, "token_budget": streams * prompt}
    engine = decoder_engine(folder, num_pages=streams * (-(-(prompt + steps) // 16)), **config)
    random, params = Random(0), SamplingParams(max_tokens=steps)
    requests = [engine.prepare(random.choices(range(1, VOCAB), k=prompt), params) for _ in range(streams)]
    loop = RequestDecider(engine, max_requests=streams).loop

    async def main() -> None:
        pending = [RequestTicket(r.sequences(), owner=loop, reader=Reader()) for r in requests]
        for request in pending:
            assert request.reader is not None
            request.reader.attach()
            loop.submit(request, block=True)
        await asyncio.gather(*map(read, pending))

    launches = cast(InstantExecutor, engine.executor).launches
    asyncio.run(main())
    loop.close(drain=False)
    together = [seconds for rows, seconds in launches if rows == streams]
    return [1e3 * (after - before) for before, after in itertools.pairwise(together)]


# Many requests


def prompts_of(count: int) -> list[list[int]]:
    random = Random(0)
    return [random.choices(range(1, VOCAB), k=random.randint(4, 40)) for _ in range(count)]


def small_engine(folder: Path) -> Engine:
    return decoder_engine(folder, num_pages=4096, max_batch=64, context=512)


def pending_of(engine: Engine, count: int, **options: Any) -> list[RequestTicket]:
    params = SamplingParams(max_tokens=400)
    return [RequestTicket(engine.prepare(p, params).sequences(), owner=engine, **options) for p in prompts_of(count)]


def submit_all(loop: Loop[RequestTicket], engine: Engine, pending: list[RequestTicket]) -> None:
    """Submit all requests during one step."""
    is_open = cast(InstantExecutor, engine.executor).open
    is_open.clear()
    for request in pending:
        loop.submit(request, block=True)
    is_open.set()


def embed_texts(folder: Path, count: int) -> Callable[[], object]:
    """Prepare `Embedder.embed` of many texts."""
    engine, texts = encoder_engine(folder), prompts_of(count)
    return lambda: embed(engine, texts, size=len(VECTOR))


def embed_in_line(folder: Path, count: int) -> Callable[[], object]:
    """Prepare `AsyncLLM.embed` of many texts, most of which stand in line at first."""
    engine = encoder_engine(folder)
    requests = [engine.prepare(prompt, PoolingParams()) for prompt in prompts_of(count)]

    async def main() -> None:
        loop = RequestDecider(engine, max_requests=1024).loop
        reader = Reader()
        reader.attach()
        pending = [RequestTicket(r.sequences(), owner=loop, reader=reader) for r in requests]
        for request in pending:
            loop.submit(request, block=True)
        for request in pending:
            await request.wait()
        loop.close(drain=False)

    return lambda: asyncio.run(main())


def generate_texts(folder: Path, count: int) -> Callable[[], object]:
    """Prepare `LLM.generate` for many prompts."""
    engine = small_engine(folder)
    requests = [engine.prepare(prompt, SamplingParams(max_tokens=2)) for prompt in prompts_of(count)]

    def run() -> None:
        for _ in engine.run([request.sequences() for request in requests]):
            pass

    return run


def abort_queued(folder: Path, count: int) -> Callable[[], object]:
    """Prepare many requests that are queued, and then aborted in another order."""
    engine = small_engine(folder)
    requests = [engine.prepare(prompt, SamplingParams(max_tokens=400)) for prompt in prompts_of(count)]

    def run() -> None:
        for request in requests:
            engine.add(request.sequences())
        engine.step()
        for request in Random(1).sample(requests, len(requests)):
            engine.abort(request.request_id)
        engine.drain()

    return run


def cancel_pending(folder: Path, count: int) -> Callable[[], object]:
    """Prepare many callers that cancel their requests."""
    engine = small_engine(folder)
    pending, loop = pending_of(engine, count), RequestDecider(engine, max_requests=count).loop

    def run() -> None:
        submit_all(loop, engine, pending)
        for request in Random(1).sample(pending, len(pending)):
            assert request.future is not None
            request.future.cancel()
        loop.close(drain=True)

    return run


def close_with_pending(folder: Path, count: int) -> Callable[[], object]:
    """Prepare closing a model while many requests are queued."""
    engine = small_engine(folder)
    pending, loop = pending_of(engine, count), RequestDecider(engine, max_requests=count).loop

    def run() -> None:
        submit_all(loop, engine, pending)
        loop.close(drain=False)
        assert all(isinstance(request.outcome, ClosedError) for request in pending)

    return run


CASES = (embed_texts, embed_in_line, generate_texts, abort_queued, cancel_pending, close_with_pending)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Measure the CPU time of all threads, including that of Python's garbage collector.

    Objects that exist already are frozen. The collector walks all objects once they have grown by a quarter: with few
    items on top of the 100,000 objects of the modules it would never run, and so would cost nothing except for many
    items.
    """
    gc.collect()
    gc.freeze()
    try:
        start = time.process_time()
        run()
        return time.process_time() - start
    finally:
        gc.unfreeze()


def microseconds_an_item(make: Callable[[int], Callable[[], object]], rounds: int) -> dict[int, float]:
    """Measure an item's CPU time for each number of items: the median of rounds, in turns, of as many items each."""
    times: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(rounds):
        for count, samples in times.items():
            samples.append(1e6 / MANY * sum(cpu_seconds(make(count)) for _ in range(MANY // count)))
    return {count: statistics.median(samples) for count, samples in times.items()}


def queues(report: Report, settings: Settings) -> None:
    ratios = []
    for case in CASES:
        times = microseconds_an_item(functools.partial(case, settings.demo), 3 if settings.quick else ROUNDS)
        ratios.append(times[MANY] / times[FEW])
        shown = {f"us_at_{n}": round(value, 1) for n, value in times.items()}
        report.row(figure="queue", case=case.__name__, **shown, ratio=round(ratios[-1], 3))
    report.check("queues_linear", max(ratios), "x", target=1.2, better="lower")
    times = host_ms(settings.demo, streams=STREAMS, prompt=PROMPT, steps=STEPS)
    report.row(figure="host work", streams=STREAMS, prompt=PROMPT, steps=len(times), p90_ms=round(quantile(times), 2))
    report.check("host_ms_256_streams", statistics.median(times), "ms", target=5.0, better="lower")


def quantile(values: list[float]) -> float:
    """Compute the ninth decile."""
    return statistics.quantiles(values, n=10)[-1]
