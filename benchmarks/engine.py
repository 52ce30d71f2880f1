"""The engine under many requests: its throughput against peers in the same run, and what its own parts gain.

    python -m benchmarks.engine [--quick] [--only throughput,prefix] [--json benchmarks/results/engine.json]

`throughput` gives every engine the same requests at once, prompts and outputs of mixed lengths, on the model of
`peers/make_model.py`. Each schedules them in the way that suits it best, found before the timed rounds on the same
requests at half their lengths; ours runs as it comes. The other parts run our engine alone, some of them on the demo
model, because a model must have learnt something for its text to be predictable.
"""

import argparse
import itertools
import math
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import rich

from benchmarks.peers.worker import VOCAB
from benchmarks.report import Report
from benchmarks.workers import Worker, add_options, find_peers, make_models, workers
from jaxinfer import LLM, SamplingParams
from jaxinfer.compiled import Program
from jaxinfer.generation.request import FinishReason
from jaxinfer.generation.signatures import OF_MODEL

PROMPT, OUTPUT = 128, 64  # mean tokens of a request, each of them uniform within half of it
PREFIX, OWN = 512, 16  # tokens of a prompt that requests share, and that they do not
DRAFT_TOKENS = 7
SWITCH_SECONDS = 1e-4  # how long the watcher of StepGaps may wait for the interpreter

# Texts that go on as they began.
REPETITIVE = (
    "codes = {\n" + "    'name': 'value',\n" * 16,
    "values = [\n" + "    0, 1, 0, 1, 0, 1, 0, 1,\n" * 8,
    "class TestRead(unittest.TestCase):\n" + "    def test_read(self):\n        self.assertEqual(1, 1)\n\n" * 6,
)
UNPREDICTABLE = ("import os\n", "def main():\n", "class Reader:\n    ")


class Settings(NamedTuple):
    """What the parts are told."""

    quick: bool
    folder: Path
    demo: Path
    peer_python: Path | None
    threads: int

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3


# Throughput


def workload(requests: int, scale: float = 1.0) -> tuple[list[list[int]], list[int]]:
    """Random prompts, and how many tokens each is to be continued by; lengths in proportion to `scale`."""
    source = random.Random(0)
    lengths = [[round(scale * mean * source.uniform(0.5, 1.5)) for mean in (PROMPT, OUTPUT)] for _ in range(requests)]
    return [[source.randrange(3, VOCAB) for _ in range(prompt)] for prompt, _ in lengths], [n for _, n in lengths]


def run_all(worker: Worker, work: tuple[list[list[int]], list[int]], way: dict[str, Any]) -> dict[str, Any]:
    """One engine's seconds and tokens for all requests. Every request must have got what it asked for."""
    time.sleep(0.2)  # let the threads of the engine before go to sleep
    answer = worker.ask(do="throughput", prompts=work[0], outputs=work[1], way=way)
    for index, (tokens, count) in enumerate(zip(answer["tokens"], work[1], strict=True)):
        if len(tokens) != count:
            raise SystemExit(f"{worker.engine} gave request {index} {len(tokens)} tokens instead of {count}.")
    return answer


def best_way(worker: Worker, requests: int) -> dict[str, Any]:
    """The fastest of an engine's ways, each tried once; what is compiled or allocated on first use is so by now."""
    work = workload(requests, scale=0.5)
    ways = [way for way in worker.ways if way["batch"] <= requests] or worker.ways[:1]
    seconds = [run_all(worker, work, way)["seconds"] for way in ways]
    for way, spent in zip(ways, seconds, strict=True):
        rich.print(f"  {worker.engine} {way}: {spent:.1f} s at half lengths")
    return ways[seconds.index(min(seconds))]


def check_agreement(answers: dict[str, list[list[int]]]) -> None:
    """Nearly all outputs must begin alike; over many tokens, rounding tips a choice between equals."""
    ours = answers["jaxinfer"]
    for engine, tokens in answers.items():
        alike = sum(mine[:8] == theirs[:8] for mine, theirs in zip(ours, tokens, strict=True)) / len(ours)
        if alike < 0.9:
            raise SystemExit(f"{engine} begins only {alike:.0%} of the outputs as jaxinfer does: not the same model.")


def throughput(report: Report, settings: Settings, dtype: str) -> dict[str, float]:
    """Wanted output tokens a second of every engine that runs `dtype`, all requests given at once."""
    requests = 16 if settings.quick else 64
    work = workload(requests)
    peer_python = find_peers(settings.peer_python)
    make_models(settings.folder, peer_python)
    with workers(dtype, settings.folder, peer_python, settings.threads) as found:
        report.versions |= {w.engine: w.version for w in found if w.engine != "jaxinfer"}
        rich.print(f"throughput, {dtype}: {settings.rounds} rounds of {', '.join(w.engine for w in found)}")
        ways = {worker.engine: best_way(worker, requests) for worker in found}
        seconds: dict[str, list[float]] = {worker.engine: [] for worker in found}
        tokens = {}
        for _ in range(settings.rounds):
            for worker in found:
                answer = run_all(worker, work, ways[worker.engine])
                seconds[worker.engine].append(answer["seconds"])
                tokens[worker.engine] = answer["tokens"]
    if dtype == "float32":  # int8 rounds differently everywhere
        check_agreement(tokens)
    rates = {engine: sum(work[1]) / statistics.median(times) for engine, times in seconds.items()}
    for engine, rate in rates.items():
        rich.print(f"  {engine}: {rate:.1f} tokens/s, {ways[engine]}")
        report.row(
            figure="throughput",
            engine=engine,
            dtype=dtype,
            way=ways[engine],
            requests=requests,
            prompt_tokens=sum(map(len, work[0])),
            output_tokens=sum(work[1]),
            tokens_per_s=round(rate, 1),
            all_s=[round(value, 2) for value in seconds[engine]],
        )
    return rates


def throughput_float32(report: Report, settings: Settings) -> None:
    rates = throughput(report, settings, "float32")
    ours = rates.pop("jaxinfer")
    report.check("throughput_vs_best_peer", ours / max(rates.values()), "x", target=1.3)
    report.check("throughput_vs_fixed_batches", ours / rates["transformers"], "x", target=1.3)


def throughput_int8(report: Report, settings: Settings) -> None:
    throughput(report, settings, "int8")


# What our own engine's parts gain


def our_model(settings: Settings) -> Path:
    """The peers' model in our format, written if need be."""
    if not (settings.folder / "jaxinfer").exists():
        make_models(settings.folder, find_peers(settings.peer_python))
    return settings.folder / "jaxinfer"


def prefix(report: Report, settings: Settings) -> None:
    """Time to the first token where the cache has most of the prompt, against where it has nothing of it."""
    llm = LLM(our_model(settings), dtype="float32", max_batch=8, context=1024)
    source = random.Random(0)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def draw(count: int) -> list[int]:
        return [source.randrange(3, VOCAB) for _ in range(count)]

    def first_token(prompt: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([prompt], one)
        return time.perf_counter() - start

    pairs = []
    for _ in range(1 + (3 if settings.quick else 7)):
        shared = draw(PREFIX)
        pairs.append([first_token(shared + draw(OWN)) for _ in ("miss", "hit")])
    miss, hit = (statistics.median(times) for times in zip(*pairs[1:], strict=True))  # the first pair compiles
    report.row(figure="prefix", shared=PREFIX, own=OWN, miss_ms=round(1e3 * miss, 1), hit_ms=round(1e3 * hit, 1))
    report.check("prefix_hit_ttft_gain", miss / hit, "x", target=4)


def decode_rates(
    plain: LLM, drafting: LLM, prompt: str | list[int], params: SamplingParams, rounds: int
) -> tuple[float, float]:
    """Tokens a second after the first, without and with drafts: medians of rounds in turn, after one to compile."""
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    for _ in range(1 + rounds):
        tokens = {}
        for name, llm in (("plain", plain), ("drafting", drafting)):
            completion = llm.generate([prompt], params)[0].completions[0]
            assert completion.timings.tokens_per_s is not None
            rates[name].append(completion.timings.tokens_per_s)
            tokens[name] = completion.token_ids
        if tokens["plain"] != tokens["drafting"]:
            at = [a == b for a, b in zip(*tokens.values(), strict=False)].index(False)
            raise SystemExit(f"Drafts changed token {at} of {prompt[:40]!r}: {tokens}")
    return statistics.median(rates["plain"][1:]), statistics.median(rates["drafting"][1:])


def speculation(report: Report, settings: Settings) -> None:
    """Decode rates of one request with drafts against without, where text repeats and where it cannot be predicted.

    A check's value is the lower of two models' geometric means over their prompts.
    """
    source = random.Random(0)
    noise = [[source.randrange(3, VOCAB) for _ in range(64)] for _ in range(3)]
    # model, its options, prompts that repeat, prompts that do not, tokens
    models = (
        ("demo", settings.demo, REPETITIVE, UNPREDICTABLE, 256),
        ("random", our_model(settings), [prompt[:4] * 16 for prompt in noise], noise, 96),
    )
    gains: dict[str, list[float]] = {"speculation_gain_repetitive": [], "speculation_worst": []}
    for name, folder, repetitive, unpredictable, count in models:
        options: dict[str, Any] = {"dtype": "float32", "max_batch": 1, "context": 512}
        plain, drafting = LLM(folder, **options), LLM(folder, **options, draft_tokens=DRAFT_TOKENS)
        for figure, prompts, temperature in zip(gains, (repetitive, unpredictable), (0.0, 1.0), strict=True):
            ratios = []
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True)
                without, drafted = decode_rates(plain, drafting, prompt, params, settings.rounds)
                ratios.append(drafted / without)
                report.row(figure=figure, model=name, prompt=seed, without=round(without, 1), drafted=round(drafted, 1))
            gains[figure].append(statistics.geometric_mean(ratios))
    report.check("speculation_gain_repetitive", min(gains["speculation_gain_repetitive"]), "x", target=1.5)
    report.check("speculation_worst", min(gains["speculation_worst"]), "x", target=0.95)


class StepGaps:
    """When each step's results were ready, and when the next step had been dispatched.

    A thread waits for the results, and notes the time within SWITCH_SECONDS. Dispatch is noted when the call of the
    program returns, so that a gap holds all that the host did in between.
    """

    def __init__(self) -> None:
        self.dispatched: list[float] = []
        self.ready: list[float] = []
        self._results: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while (result := self._results.get()) is not None:
            result.block_until_ready()
            self.ready.append(time.perf_counter())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every call of a program that runs the model, within this context."""
        call, interval = Program.__call__, sys.getswitchinterval()
        dispatched, results = self.dispatched, self._results

        def noted(self: Program, *args: Any) -> Any:
            result = call(self, *args)
            if self.name in OF_MODEL:
                dispatched.append(time.perf_counter())
                results.put(jax.tree.leaves(result[1])[0])  # the state, result[0], will have been given away
            return result

        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        try:
            Program.__call__ = noted
            yield
        finally:
            Program.__call__ = call
            self._results.put(None)
            self._thread.join()
            sys.setswitchinterval(interval)

    def seconds(self) -> list[float]:
        """The gap before every step but the first."""
        return [max(0.0, then - ready) for ready, then in zip(self.ready, self.dispatched[1:], strict=False)]


def measured_gaps(llm: LLM, steps: int) -> list[float]:
    """Milliseconds between steps of one token for eight requests, in ascending order."""
    prompts = [f"def part_{index}():\n" for index in range(8)]
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    llm.generate(prompts, params)  # compiles
    gaps = StepGaps()
    with gaps.watching():
        llm.generate(prompts, params)
    return sorted(1e3 * value for value in gaps.seconds())


def step_gap(report: Report, settings: Settings) -> None:
    """How long the device waits for the host between two steps, and how long it would if steps did not overlap."""
    steps = 64 if settings.quick else 256
    for overlap in (False, True):
        gaps = measured_gaps(LLM(settings.demo, max_decode_steps=1, overlap=overlap), steps)
        median, p99 = statistics.median(gaps), gaps[math.ceil(0.99 * len(gaps)) - 1]
        report.row(
            figure="step gap", overlap=overlap, steps=len(gaps), median_ms=round(median, 3), p99_ms=round(p99, 3)
        )
        if overlap:
            report.check("step_gap_ms", median, "ms", target=0.5, better="lower")


def random_requests(llm: LLM, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of every length and kind that this engine takes."""
    source = random.Random(0)
    requests = []
    for index in range(count):
        length = source.randint(1, llm.engine.context - 1)
        params = SamplingParams(
            temperature=source.choice((0.0, 0.7, 1.0)),
            top_k=source.choice((0, 20)),
            top_p=source.choice((1.0, 0.9)),
            repetition_penalty=source.choice((1.0, 1.1)),
            logprobs=source.choice((None, 3)),
            prompt_logprobs=source.choice((None, None, 1)),
            max_tokens=source.randint(1, 48),
            seed=index,
        )
        requests.append(([source.randrange(3, llm.model.config.vocab) for _ in range(length)], params))
    return requests


def compile_misses(report: Report, settings: Settings) -> None:
    """Programs that were missing after compiling ahead, in requests that come while others run, a few given up."""
    llm = LLM(settings.demo)
    start = time.perf_counter()
    llm.engine.compile_ahead()
    report.row(figure="compiling ahead", seconds=round(time.perf_counter() - start, 1))
    engine, programs = llm.engine, llm.engine.runner.programs
    before, source = programs.misses, random.Random(1)
    requests = [engine.prepare(*request) for request in random_requests(llm, 200)]
    waiting = iter(requests)
    while not all(sequence.finished for request in requests for sequence in request):
        for request in itertools.islice(waiting, source.choice((0, 0, 1, 3))):
            engine.add(request)
        if source.random() < 0.01:
            engine.abort(source.choice(requests)[0].request_id)
        engine.step()
    if failed := sum(request[0].finish_reason == FinishReason.ERROR for request in requests):
        raise SystemExit(f"{failed} of {len(requests)} requests ended with an error.")
    report.check("compile_misses", programs.misses - before, "programs", target=0, better="lower")


PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "throughput": throughput_float32,
    "throughput_int8": throughput_int8,
    "prefix": prefix,
    "speculation": speculation,
    "step_gap": step_gap,
    "compile_misses": compile_misses,
}


def read_parts(text: str) -> list[str]:
    """The parts named in `--only`."""
    names = text.split(",")
    if unknown := set(names) - PARTS.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of three, of 16 requests, not in int8")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    add_options(parser)
    args = parser.parse_args()
    if not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    settings = Settings(args.quick, args.work_dir, args.demo, args.peer_python, args.threads)
    report = Report()
    for name in args.only or [part for part in PARTS if not (args.quick and part == "throughput_int8")]:
        PARTS[name](report, settings)
    report.finish(args.json)


if __name__ == "__main__":
    main()
