"""The products of a decode step alone: all matrices of a model in one program, through the operations that models call.

    python -m benchmarks.cpu_decode.products MODEL DTYPE ROWS ROUNDS

measures one of them and prints JSON; as a part, it measures all in processes of their own.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode.peers import BATCHES, SHORT
from benchmarks.cpu_decode.step_bytes import QUANTISED
from benchmarks.cpu_decode.steps import MODEL
from benchmarks.report import Report
from benchmarks.workers import run_module
from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, WeightMemory
from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.compiled.options import LARGE_WEIGHTS, compiler_options
from jaxinfer.models import DecoderConfig
from jaxinfer.models.presets import preset
from jaxinfer.pallas_kernels import Weights, linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.weights import quantize

DTYPES = ("float32", "int8", "int4")
CALLS = 3
"""Calls of a round."""
PASSES = 4
"""Times that a call multiplies by all matrices, as an engine's step has several passes."""


class Chain(Sizes):
    """The program of one number of rows."""

    program = "products"


def matrices(config: DecoderConfig, dtype: str) -> list[tuple[Weights, ...]]:
    """Make the matrices of every layer (qkv, out, gate and up, down), and the head; they lie where models' do."""
    attention, rng = config.layer(0).attention, np.random.default_rng(0)
    width = attention.q_heads * attention.head_dim
    qkv = attention.kv_heads * (attention.group + 2) * attention.head_dim
    hidden = config.layer(0).mlp.hidden
    shapes = ((qkv, config.embed), (config.embed, width), (2 * hidden, config.embed), (config.embed, hidden))

    def make(shape: tuple[int, int], fmt: str) -> Weights:
        matrix = jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)
        return quantize(matrix, fmt) if fmt in QUANTISED else Weights(matrix.astype(fmt))  # type: ignore[arg-type]

    first = tuple(make(shape, dtype) for shape in shapes)
    table = "int8" if config.tied and dtype == "int4" else dtype  # as models store it
    head = make((config.vocab, config.embed), table)
    leaves = [*jax.tree.leaves(first) * config.layers, *jax.tree.leaves(head)]
    memory = WeightMemory(sum(leaf.nbytes + ARRAY_ALIGNMENT for leaf in leaves))
    copies = [jax.tree.map(memory.move, first) for _ in range(config.layers)]
    return [*copies, (jax.tree.map(memory.move, head),)]


def chain(x: jax.Array, scale: jax.Array, weights: list[tuple[Weights, ...]], *, width: int) -> jax.Array:
    """Multiply by all of them, each product of what the one before gave, and that several times: [N, D] -> [N, D]."""
    *layers, (head,) = weights

    def once(_: int, x: jax.Array) -> jax.Array:
        start = x
        for qkv, out, gate_up, down in layers:
            heads = norm_linear(x, scale, None, qkv, eps=1e-5)[:, :width]
            x = linear_residual(heads, out, x)
            x = linear_residual(norm_linear(x, scale, None, gate_up, eps=1e-5, activation="silu", gated=True), down, x)
        return start + small_batch_linear(x, head).mean(1, keepdims=True)

    return jax.lax.fori_loop(0, PASSES, once, x)


def measure(model: str, dtype: str, rows: int, rounds: int) -> dict[str, Any]:
    """Measure the median milliseconds of a pass, the bytes that it reads, and its share of the bandwidth.

    Both in one process, in turn, as the memory's rate may change within seconds: of the mean before and after a round.
    """
    config = preset(model)
    weights = matrices(config, dtype)
    x = jnp.ones((rows, config.embed), dtype if dtype == "bfloat16" else "float32")
    scale = jnp.ones(config.embed, jnp.float32)
    width = config.layer(0).attention.q_heads * config.layer(0).attention.head_dim
    stored = weights[0][0].weight.dtype
    spec = ProgramSpec[Chain, None](
        sizes=Chain,
        build=lambda static, sizes: functools.partial(chain, width=width),
        arguments=lambda sizes: (x, scale, weights),
        reachable=lambda buckets: (Chain(),),
        compiler_options=lambda sizes: compiler_options("cpu", rows=rows, dtype=stored, weight_bytes=LARGE_WEIGHTS),
    )
    program, size = spec.compile(Chain()), sum(leaf.nbytes for leaf in jax.tree.leaves(weights))

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(x, scale, weights))
        return (time.perf_counter() - start) / PASSES

    bandwidth = ReadBandwidth()
    # The first call after another program is not counted.
    taken, given = bandwidth.in_turn(lambda: [seconds() for _ in range(1 + CALLS)][1:], rounds)
    shares = [size / statistics.median(times) / 1e9 / rate for times, rate in zip(taken, given, strict=True)]
    return {
        "step_ms": round(1e3 * statistics.median(itertools.chain(*taken)), 2),
        "bytes": size,
        "in_turn": round(statistics.median(shares), 3),
        "bandwidth": bandwidth.ways,
    }


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure every format at batch 1, which is checked, and 8."""
    bandwidth = ReadBandwidth()
    for dtype in DTYPES:
        for rows in BATCHES:
            result = run_module("benchmarks.cpu_decode.products", MODEL, dtype, str(rows), str(args.rounds))
            bandwidth.include(result.pop("bandwidth"))
            rate = result.pop("bytes") / result["step_ms"] / 1e6
            check = {"check": f"products_{SHORT.get(dtype, dtype)}_of_bandwidth"} if rows == 1 else {}
            row = {"model": MODEL, "dtype": dtype, "rows": rows, **result, "gb_per_s": round(rate, 2)}
            report.row(figure="products", **row, **check)
            print(f"products of {rows} rows, {dtype}: {result['step_ms']} ms, {rate:.1f} GB/s", flush=True)
            report.save(args.json)
    report.row(**bandwidth.row())


if __name__ == "__main__":
    name, kind, *counts = sys.argv[1:]
    print(json.dumps(measure(name, kind, *map(int, counts))))
