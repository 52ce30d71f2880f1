"""A mixture of experts in an eighth of its memory, whose experts come from disk."""

import argparse
import contextlib
import dataclasses
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.moe.models import decoder
from benchmarks.report import Report
from benchmarks.streaming.disk import Way, fio
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.execution.chain import ChainDecoderPasses
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.models import Decoder, DecoderConfig, WeightFormat
from jaxinfer.models import config as c
from jaxinfer.models.files.loading import open_model, save_model
from jaxinfer.models.layers.moe import Moe
from jaxinfer.streaming.experts import ExpertCache
from jaxinfer.streaming.layer_folders import write_layer_files
from jaxinfer.streaming.prediction import measure_disk

EXPERTS, CHOSEN, HIDDEN, EMBED = 64, 2, 768, 512
CAP_RATIO = 8
VOCAB, CONTEXT, TOKENS, ALL_TOKENS = 1024, 128, 48, 4
FIO = Way("2m", 4, huge_pages=True)  # blocks and threads are ours
FIO_SECONDS = 5
SKEWS = {"uniform": 0.0, "skewed": 0.1}
"""By name of a router, by how much of log(i) the i-th of its experts is scored lower for being chosen. Scores, sigmoids
of normal logits, have a deviation of 0.2."""


def run(report: Report, args: argparse.Namespace) -> None:
    """Decode with one sequence: what is read, how fast, against all experts of each layer and the disk's own speed.

    Tokens are drawn from the whole vocabulary, so that each chooses its experts anew. Routers are random, and choose
    all experts equally often, or by a bias some more often than others.
    """
    for name, spread in SKEWS.items():
        model = args.work_dir / f"streaming-{name}"
        if not model.exists():
            _save(model, spread)
        folder = write_layer_files(open_model(model), model)
        measured = _measure(model, args.rounds)
        ceiling = fio(folder, FIO, FIO_SECONDS) if shutil.which("fio") else measure_disk(folder)
        by = "fio" if shutil.which("fio") else "measure_disk"
        report.row(figure="streaming", router=name, disk_gb_per_s=round(ceiling / 1e9, 3), disk_by=by, **measured)
        print(report.rows[-1], flush=True)
        suffix = "" if name == "skewed" else f"_{name}"
        report.check(
            f"streamed_bytes_per_token{suffix}",
            measured["bytes_read"] / measured["bytes_missing"],
            "x of the experts touched and not there",
            target=1.2,
            better="lower",
        )
        speeds = measured["tokens_per_s"], measured["all_experts_tokens_per_s"]
        report.check(f"streamed_vs_all_experts{suffix}", speeds[0] / speeds[1], "x the tokens/s", target=3)
        bandwidth = measured["gb_per_s"] * 1e9
        report.check(f"streamed_vs_disk{suffix}", bandwidth / ceiling, f"of {by}", target=0.8)


def _save(path: Path, spread: float) -> None:
    """Write a random mixture, whose routers choose some experts more often than others. spread: as in `SKEWS`."""
    model = Decoder(_config(), WeightFormat(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for layer in model.layers:
        assert isinstance(layer.mlp, Moe)
        router, ranks = layer.mlp.router, rng.permutation(np.arange(1, EXPERTS + 1))
        assert router.selection_bias is not None
        router.weight[...] = rng.normal(0, EMBED**-0.5, (EXPERTS, EMBED)).astype(np.float32)
        router.selection_bias[...] = (-spread * np.log(ranks)).astype(np.float32)
    model.embed.table[...] *= 50  # the token decides, rather than what comes before it
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(path, model, family="random")


def _config() -> DecoderConfig:
    router = c.RouterConfig(experts=EXPERTS, experts_per_token=CHOSEN, kind=c.RouterKind.SIGMOID, selection_bias=True)
    mlp = c.MlpConfig(hidden=HIDDEN, activation=c.Activation.SILU, gated=True, moe=c.MoeConfig(router=router))
    return dataclasses.replace(decoder(mlp), embed=EMBED, vocab=VOCAB, context=CONTEXT)


def _measure(model: Path, rounds: int) -> dict[str, Any]:
    whole = open_model(model).bytes_per_device()
    options = {"weights": "disk", "device_memory": whole // CAP_RATIO, "max_batch": 1, "context": CONTEXT}
    with LLM(model, token_budget=16, chunk_size=16, **options) as llm:
        assert llm.placement is not None
        assert llm.placement.experts is not None
        assert llm.streaming is not None
        experts = llm.placement.experts
        _decode(llm, 32, seed=0)  # compiles, and fills what stays
        with _watched(llm) as watched:
            llm.streaming.clear()
            seconds = [_decode(llm, TOKENS, seed=1 + round_) for round_ in range(rounds)]
        streaming = llm.streaming
        read, gb_per_s = streaming.bytes["disk"], streaming.bandwidth("disk") / 1e9
        asked = streaming.expert_hits + streaming.expert_fetches
        hits = streaming.expert_hits / asked
        busiest = sum(count for _, count in watched.choices.most_common(len(watched.choices) // 10))
        with _all_experts(llm):
            slow = _decode(llm, ALL_TOKENS, seed=1)
    return {
        "model_bytes": whole,
        "cap_bytes": whole // CAP_RATIO,
        "experts": experts.count,
        "slots": experts.slots,
        "busiest_tenth_share": round(busiest / watched.choices.total(), 3),
        "hits": round(hits, 3),
        "bytes_read": read,
        "bytes_missing": watched.missing * experts.bytes,
        "gb_per_s": round(gb_per_s, 3),
        "tokens_per_s": round(TOKENS / statistics.median(seconds), 3),
        "all_experts_tokens_per_s": round(ALL_TOKENS / slow, 3),
    }


def _decode(llm: LLM, tokens: int, seed: int) -> float:
    """Compute the seconds of the tokens after the first, and that of the prompt with it."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([[1 + seed]], params)
    return time.perf_counter() - start


def _cache(llm: LLM) -> ExpertCache:
    executor = llm.engine.executor
    assert isinstance(executor, DecoderExecutor)
    assert isinstance(executor.passes, ChainDecoderPasses)
    assert executor.passes.layers.experts is not None
    return executor.passes.layers.experts


class _Watched:
    """What was asked of an expert cache.

    Attributes:
      missing: how many experts were asked for and not there.
      choices: how often each expert was asked for.
    """

    def __init__(self) -> None:
        self.missing, self.choices = 0, Counter[tuple[int, int]]()


@contextlib.contextmanager
def _watched(llm: LLM) -> Iterator[_Watched]:
    """Note what is asked of the model's expert cache."""
    cache, watched = _cache(llm), _Watched()
    groups = cache.groups

    def noting(layer: int, experts: Sequence[int]) -> Any:
        keys = [(layer, expert) for expert in experts]
        watched.choices.update(keys)
        watched.missing += sum(key not in cache for key in keys)
        return groups(layer, experts)

    cache.groups = noting  # type: ignore[method-assign]
    yield watched
    cache.groups = groups  # type: ignore[method-assign]


@contextlib.contextmanager
def _all_experts(llm: LLM) -> Iterator[None]:
    """Have all experts of each layer fetched, as where a layer is streamed whole."""
    cache = _cache(llm)
    groups = cache.groups
    cache.groups = lambda layer, experts: groups(layer, range(EXPERTS))  # type: ignore[method-assign]
    yield
    cache.groups = groups  # type: ignore[method-assign]
