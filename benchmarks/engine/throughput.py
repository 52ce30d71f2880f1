"""Output tokens per second of every engine, given the same requests at once.

Prompts and outputs have mixed lengths. Each engine schedules them in its fastest way, which is found before the timed
rounds on the same requests at half their lengths.
"""

import random
import statistics
import time
from typing import Any

import rich

from benchmarks.engine.settings import Settings
from benchmarks.peers.worker import VOCAB
from benchmarks.report import Report
from benchmarks.workers import Worker, find_peers, make_models, workers

PROMPT, OUTPUT = 128, 64  # mean tokens of a request, each uniform in 0.5 to 1.5 times the mean
AGREEING_TOKENS = 8  # from the start of an output
MIN_AGREEMENT = 0.9  # fraction of outputs; rounding decides between equally likely tokens

Workload = tuple[list[list[int]], list[int]]
"""Prompts as token ids, and how many tokens to generate for each."""


def make_workload(requests: int, scale: float = 1.0) -> Workload:
    """Random prompts and output lengths, proportional to `scale`."""
    source = random.Random(0)
    lengths = [[round(scale * mean * source.uniform(0.5, 1.5)) for mean in (PROMPT, OUTPUT)] for _ in range(requests)]
    return [[source.randrange(3, VOCAB) for _ in range(prompt)] for prompt, _ in lengths], [n for _, n in lengths]


def run_all(worker: Worker, work: Workload, way: dict[str, Any]) -> dict[str, Any]:
    """One engine's seconds and tokens for all requests. Exits if a request got another number of tokens."""
    time.sleep(0.2)  # until the previous engine's threads are idle
    answer = worker.ask(do="throughput", prompts=work[0], outputs=work[1], way=way)
    for index, (tokens, count) in enumerate(zip(answer["tokens"], work[1], strict=True)):
        if len(tokens) != count:
            raise SystemExit(f"{worker.engine} gave request {index} {len(tokens)} tokens instead of {count}.")
    return answer


def best_way(worker: Worker, requests: int) -> dict[str, Any]:
    """The fastest of an engine's ways, each tried once, which also compiles and allocates what later rounds need."""
    work = make_workload(requests, scale=0.5)
    ways = [way for way in worker.ways if way["batch"] <= requests] or worker.ways[:1]
    seconds = [run_all(worker, work, way)["seconds"] for way in ways]
    for way, spent in zip(ways, seconds, strict=True):
        rich.print(f"  {worker.engine} {way}: {spent:.1f} s at half lengths")
    return ways[seconds.index(min(seconds))]


def check_agreement(answers: dict[str, list[list[int]]]) -> None:
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


def throughput(report: Report, settings: Settings, dtype: str) -> dict[str, float]:
    """Requested output tokens per second of every engine that runs `dtype`."""
    requests = 16 if settings.quick else 64
    work = make_workload(requests)
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
    if dtype == "float32":  # int8 rounds differently in every engine
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
