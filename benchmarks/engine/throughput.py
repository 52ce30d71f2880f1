"""Output tokens per second of every engine, given the same requests at once.

Prompts and outputs have mixed lengths. An engine's figure is that of its fastest way of scheduling them: its ways race
at short lengths (`ways.py`), and the two best take turns in the timed rounds: with one round, only the best is timed.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence

import msgspec
import rich

from benchmarks.engine.settings import Settings
from benchmarks.engine.ways import TRIED, Trial, Way, limit_after, race
from benchmarks.peers.worker import VOCAB
from benchmarks.report import Report, machine_kind
from benchmarks.workers import Worker, find_peers, make_models, workers
from jaxinfer.compiled.machine import machine

PROMPT, OUTPUT = 128, 64  # mean tokens of a request, each uniform in 0.5 to 1.5 times the mean
SHORT = 1 / 8  # fraction of these lengths at which ways race
AGREEING_TOKENS = 8  # from the start of an output
MIN_AGREEMENT = 0.9  # fraction of outputs; rounding decides between equally likely tokens

Workload = tuple[list[list[int]], list[int]]
"""Prompts as token ids, and the number of tokens to generate for each."""

Tokens = list[list[int]]
"""The output of every prompt."""


def make_workload(requests: int, scale: float = 1.0) -> Workload:
    """Draw random prompts and output lengths, proportional to `scale`."""
    source = random.Random(0)
    lengths = [[round(scale * mean * source.uniform(0.5, 1.5)) for mean in (PROMPT, OUTPUT)] for _ in range(requests)]
    return [[source.randrange(3, VOCAB) for _ in range(prompt)] for prompt, _ in lengths], [n for _, n in lengths]


def run_all(worker: Worker, work: Workload, way: Way, limit: float | None) -> tuple[Trial, Tokens | None]:
    """Run all requests on an engine; return its tokens too, unless it was stopped after `limit` seconds.

    Exits if a request got another number of tokens.
    """
    time.sleep(0.2)  # until the previous engine's threads are idle
    answer = worker.ask(do="throughput", prompts=work[0], outputs=work[1], way=way, limit=limit)
    trial = Trial(way=way, seconds=round(answer["seconds"], 2), stopped="tokens" not in answer)
    if trial.stopped:
        return trial, None
    for index, (tokens, count) in enumerate(zip(answer["tokens"], work[1], strict=True)):
        if len(tokens) != count:
            raise SystemExit(f"{worker.engine} gave request {index} {len(tokens)} tokens instead of {count}.")
    return trial, answer["tokens"]


def fastest_ways(report: Report, settings: Settings, worker: Worker, requests: int) -> list[Way]:
    """Find an engine's two best ways at short lengths. Trying them also allocates and compiles what the rounds need."""
    work, where = make_workload(requests, SHORT), machine_kind(machine())
    subject = f"{where}; {worker.version}, {worker.dtype}, {settings.threads} threads; {requests} requests"
    remembered = [] if settings.search else settings.memory.recall(subject)

    def measure(way: Way, limit: float | None) -> Trial:
        trial, _ = run_all(worker, work, way, limit)
        known = [f" (remembered: {old.seconds} s of {old.date})" for old in remembered if old.way == way]
        rich.print(f"  {worker.engine}, {trial}{''.join(known)}")
        return trial

    ways = [way for way in worker.ways if way["batch"] <= requests] or worker.ways[:1]
    trials = race(ways, remembered, measure)
    for trial in remembered:
        if all(trial.way != tried.way for tried in trials):
            rich.print(f"  {worker.engine}, {trial} on {trial.date}, not tried again")
    settings.memory.remember(subject, trials)
    tried, known = (msgspec.to_builtins(some) for some in (trials, remembered))
    report.row(figure="ways", engine=worker.engine, dtype=worker.dtype, tried=tried, remembered=known)
    return [trial.way for trial in trials[:TRIED]]


def take_turns(
    engines: list[Worker], work: Workload, ways: Mapping[str, list[Way]], count: int
) -> tuple[dict[str, list[Trial]], dict[str, Tokens]]:
    """Run `count` rounds of every engine, each in the next of its ways; return them with its tokens."""
    rounds: dict[str, list[Trial]] = {worker.engine: [] for worker in engines}
    tokens: dict[str, Tokens] = {}
    for number in range(count):
        for worker in engines:
            mine, before = ways[worker.engine], rounds[worker.engine]
            trial, produced = run_all(worker, work, mine[number % len(mine)], limit_after(before))
            rich.print(f"  round {number + 1}: {worker.engine}, {trial}")
            before.append(trial)
            tokens |= {worker.engine: produced} if produced else {}
    return rounds, tokens


def best_way(rounds: Sequence[Trial]) -> Trial:
    """The way with the smallest median of seconds."""
    seconds: dict[str, list[Trial]] = {}
    for trial in rounds:
        if not trial.stopped:
            seconds.setdefault(str(trial.way), []).append(trial)
    medians = [Trial(way=same[0].way, seconds=statistics.median(t.seconds for t in same)) for same in seconds.values()]
    return min(medians, key=lambda trial: trial.seconds)


def check_agreement(answers: dict[str, Tokens]) -> None:
    """Exit unless nearly all outputs of every engine start with the same tokens as ours."""
    ours = answers["jaxinfer"]
    for engine, tokens in answers.items():
        same = sum(
            mine[:AGREEING_TOKENS] == theirs[:AGREEING_TOKENS] for mine, theirs in zip(ours, tokens, strict=True)
        )
        if same / len(ours) < MIN_AGREEMENT:
            raise SystemExit(
                f"Only {same / len(ours):.0%} of the outputs of {engine} start as jaxinfer's do: not the same model."
            )


def throughput(report: Report, settings: Settings, dtype: str, requests: int) -> dict[str, float]:
    """Measure the requested output tokens per second of every engine that runs `dtype`."""
    work = make_workload(requests)
    peer_python = find_peers(settings.peer_python)
    make_models(settings.folder, peer_python)
    with workers(dtype, settings.folder, peer_python, settings.threads) as engines:
        report.versions |= {w.engine: w.version for w in engines if w.engine != "jaxinfer"}
        rich.print(f"throughput, {dtype}, {requests} requests; the ways of every engine, at short lengths:")
        ways = {worker.engine: fastest_ways(report, settings, worker, requests) for worker in engines}
        rounds, tokens = take_turns(engines, work, ways, settings.rounds)
    if dtype == "float32":  # int8 rounds differently in every engine
        check_agreement(tokens)
    rates = {}
    for engine, trials in rounds.items():
        best = best_way(trials)
        rates[engine] = sum(work[1]) / best.seconds
        rich.print(f"  {engine}: {rates[engine]:.1f} tokens/s, {best.way}")
        report.row(
            figure="throughput",
            engine=engine,
            dtype=dtype,
            way=best.way,
            requests=requests,
            prompt_tokens=sum(map(len, work[0])),
            output_tokens=sum(work[1]),
            tokens_per_s=round(rates[engine], 1),
            rounds=msgspec.to_builtins(trials),
        )
    return rates


def throughput_float32(report: Report, settings: Settings) -> None:
    rates = throughput(report, settings, "float32", 16 if settings.quick else 64)
    ours = rates.pop("jaxinfer")
    report.check("throughput_vs_best_peer", ours / max(rates.values()), "x", target=1.3)
    report.check("throughput_vs_fixed_batches", ours / rates["transformers"], "x", target=1.3)


def throughput_int8(report: Report, settings: Settings) -> None:
    throughput(report, settings, "int8", 32)
