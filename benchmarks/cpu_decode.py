"""Prefill and decode on a CPU against CTranslate2, llama.cpp and transformers.

    python -m benchmarks.cpu_decode [--quick] [--json benchmarks/results/KIND/cpu_decode.json]
    python -m benchmarks.cpu_decode --model qwen3-0.6b [--json benchmarks/results/KIND/cpu_decode-qwen3-0.6b.json]

One random model (`peers/make_model.py`) in every engine's own format: a small Llama shape, or with `--model` that of
Qwen3 0.6B or Gemma 3 1B. Each engine is a process that loads it once; every figure is the median over rounds in which
all engines take turns. Nothing is timed unless all engines generate the same greedy continuation of a prompt. The JSON
is rewritten after every figure.
"""

import argparse
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from benchmarks.report import Report
from benchmarks.workers import (
    ENGINES,
    JAXINFER,
    MODELS,
    OWN_MODEL,
    Worker,
    add_options,
    find_peers,
    make_models,
    workers,
)
from jaxinfer.models import WeightFormat
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.presets import preset

PROMPT = 512  # tokens of the timed prefill


def check_agreement(engines: list[Worker]) -> None:
    """Exit unless all engines continue a prompt with the same tokens: otherwise they run different models."""
    prompt = list(range(100, 132))
    answers = {worker.engine: worker.ask(do="greedy", prompt=prompt, count=8)["tokens"] for worker in engines}
    if len({tuple(tokens) for tokens in answers.values()}) != 1:
        raise SystemExit(f"The engines' greedy continuations differ, so no comparison would be meaningful: {answers}")


def take_turns(engines: list[Worker], rounds: int, figure: str, **request: Any) -> list[dict[str, Any]]:
    """Make a row for every engine: its milliseconds in every round, after one unmeasured round."""
    times: dict[str, list[float]] = {worker.engine: [] for worker in engines}
    rich.print(f"{figure}, {engines[0].dtype}: {rounds} rounds of {', '.join(times)}")
    for counted in [False] + [True] * rounds:
        for worker in engines:
            time.sleep(0.2)  # until the previous engine's threads are idle
            seconds = worker.ask(**request)["seconds"]
            if counted:
                times[worker.engine].append(1e3 * seconds)
    return [
        {
            "figure": figure,
            "engine": worker.engine,
            "dtype": worker.dtype,
            "ms": round(statistics.median(times[worker.engine]), 2),
            "all_ms": [round(value, 2) for value in times[worker.engine]],
        }
        for worker in engines
    ]


def read_bandwidth() -> float:
    """Measure the GB/s at which all cores together read a large array: the fastest of several reductions."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones((1024, 200 * 1024), jnp.float32)  # 839 MB, about as much as the weights of a decode step
    vector = jnp.ones(1024, jnp.float32)
    reductions: list[Callable] = [lambda x, v: v @ x, lambda x, v: x.reshape(-1, 1024) @ v, lambda x, v: x.sum()]
    best = float("inf")
    for reduction in reductions:
        compiled = jax.jit(reduction)
        for _ in range(8):
            start = time.perf_counter()
            compiled(array, vector).block_until_ready()
            best = min(best, time.perf_counter() - start)
    return array.nbytes / best / 1e9


def host_overhead() -> float:
    """Measure the host's seconds of a decode step of 12 layers: until its call returns, before the results are ready.

    The layers are so small that the device thread that computes them takes little time from the host.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxinfer.compiled import ProgramSpec, Sizes
    from jaxinfer.models import Decoder, DecoderConfig, KVPages, WeightFormat
    from jaxinfer.models import config as c

    config = DecoderConfig(
        vocab=256,
        embed=64,
        layers=12,
        context=128,
        attention=c.AttentionConfig(q_heads=2, kv_heads=2, head_dim=32),
        positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=32),
        mlp=c.MlpConfig(hidden=128, activation=c.Activation.SILU, gated=True),
        norm=c.NormConfig(kind=c.NormKind.RMS),
    )
    graphdef, weights = nnx.split(Decoder(config, WeightFormat(), rngs=nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(weights)

    def step(leaves, caches, tokens, positions, page_table):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden, caches = model(tokens, positions, caches, page_table)
        return model.logits(hidden).argmax(-1).astype(jnp.int32), caches

    caches = [KVPages(*(jnp.zeros((8, 16, 2, 32)) for _ in range(2))) for _ in range(config.layers)]
    tokens, positions = jnp.ones((1, 1), jnp.int32), jnp.full((1, 1), 100, jnp.int32)
    page_table = jnp.arange(8, dtype=jnp.int32)[None]

    class Step(Sizes):
        program = "step"

    spec = ProgramSpec[Step, None](
        sizes=Step,
        build=lambda static, sizes: step,
        arguments=lambda sizes: (leaves, caches, tokens, positions, page_table),
        reachable=lambda buckets: (Step(),),
        donate=(1,),
    )
    program = spec.compile(Step())
    calls = []
    for _ in range(200):
        start = time.perf_counter()
        tokens, caches = program(leaves, caches, tokens, positions, page_table)
        calls.append(time.perf_counter() - start)
        tokens.block_until_ready()
    return statistics.median(calls)


def demo_start(demo: Path) -> float:
    """Measure the seconds of a whole `jaxinfer generate` of 16 tokens, with a warm compile cache."""
    command = [JAXINFER, "generate", demo, "--prompt", "import os\n", "--max-tokens"]
    subprocess.run([*command, "16"], check=True, stdout=subprocess.DEVNULL)
    start = time.perf_counter()
    subprocess.run([*command, "16"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def weight_bytes(model: str) -> int:
    """Count the float32 bytes of the matrices that a decode step reads: all but an embedding table that is no head."""
    config = preset(model)
    leaves = canonical_leaves(config, WeightFormat())
    matrices = {name: math.prod(leaf.shape) for name, leaf in leaves.items() if len(leaf.shape) == 2}
    return 4 * sum(size for name, size in matrices.items() if config.tied or name != "embed.table")


def add_checks(report: Report, model: str, bandwidth: float) -> None:
    """Check the peers' times relative to ours, and our float32 decode relative to the memory's read bandwidth."""
    ms = {(row["figure"], row["engine"], row["dtype"]): row["ms"] for row in report.rows if "ms" in row}

    def ratio(figure: str, dtype: str, *peers: str) -> float:
        return min(ms[figure, peer, dtype] for peer in peers) / ms[figure, "jaxinfer", dtype]

    peers = [engine for engine, dtype in ENGINES if dtype == "float32" and engine != "jaxinfer"]
    b1, b8, prefill = "decode batch 1", "decode batch 8", f"prefill {PROMPT}"
    report.check("decode_fp32_b1_vs_best_peer", ratio(b1, "float32", *peers), "x", target=1.0)
    report.check("decode_fp32_b1_vs_hf", ratio(b1, "float32", "transformers"), "x", target=1.5)
    report.check("decode_fp32_b8_vs_best_peer", ratio(b8, "float32", *peers), "x", target=1.1)
    report.check("decode_int8_b1_vs_ctranslate2", ratio(b1, "int8", "ctranslate2"), "x", target=1.0)
    report.check("prefill_vs_best_peer", ratio(prefill, "float32", *peers), "x", target=0.9)
    read = weight_bytes(model) / ms[b1, "jaxinfer", "float32"] / 1e6
    report.row(figure="read bandwidth", gb_per_s=round(bandwidth, 1), decode_fp32_b1_gb_per_s=round(read, 1))
    report.check("decode_fp32_b1_of_read_bandwidth", read / bandwidth, "", target=0.85)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the measurements: a row per engine, a column per figure."""
    columns = list(dict.fromkeys(row["figure"] for row in rows))
    table = Table("engine", "dtype", *columns, title="milliseconds, median (minimum)")
    for key in dict.fromkeys((row["engine"], row["dtype"]) for row in rows):
        cells = {
            r["figure"]: f"{r['ms']:.1f} ({min(r['all_ms']):.1f})" for r in rows if (r["engine"], r["dtype"]) == key
        }
        table.add_row(*key, *(cells.get(column, "") for column in columns))
    rich.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=OWN_MODEL, help="the model's shape")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven, and no bfloat16")
    parser.add_argument("--context", type=int, default=352, help="tokens before the first timed decode step")
    add_options(parser)
    args = parser.parse_args()
    rounds, steps = (2, 8) if args.quick else (7, 16)

    if not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    peer_python = find_peers(args.peer_python)
    folder = args.work_dir if args.model == OWN_MODEL else args.work_dir.with_name(f"cpu_decode-{args.model}")
    make_models(folder, peer_python, args.model)
    start, report, bandwidth = time.monotonic(), Report(), 0.0
    report.print_header()
    report.row(
        figure="settings", model=args.model, context=args.context, steps=steps, rounds=rounds, peer_threads=args.threads
    )
    for dtype in ("float32", "int8", "bfloat16")[: 2 if args.quick else 3]:
        with workers(dtype, folder, peer_python, args.threads) as engines:
            report.versions |= {w.engine: w.version for w in engines if w.engine != "jaxinfer"}
            if dtype == "float32":
                check_agreement(engines)
            figures: dict[str, dict[str, Any]] = {f"prefill {PROMPT}": {"do": "prefill", "tokens": PROMPT}}
            if dtype != "bfloat16":  # not compared: on a CPU the other engines are not used to decode in it
                for batch in (1, 8):
                    request = {"do": "decode", "batch": batch, "context": args.context, "steps": steps}
                    figures[f"decode batch {batch}"] = request
            for figure, request in figures.items():
                bandwidth = max(bandwidth, read_bandwidth())
                for row in take_turns(engines, rounds, figure, **request):
                    report.row(**row)
                report.save(args.json)
    print_rows([row for row in report.rows if "ms" in row])
    add_checks(report, args.model, bandwidth)
    if args.model == OWN_MODEL:
        report.check("host_overhead_ms", 1e3 * host_overhead(), "ms", target=0.3, better="lower")
        report.check("demo_warm_start_s", demo_start(args.demo), "s", target=10, better="lower")
    report.row(figure="part", part="all", seconds=round(time.monotonic() - start, 1))
    report.finish(args.json)


if __name__ == "__main__":
    main()
