"""Operations: gating by tables against one-hot masks, and products by experts against dense ones."""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
from rich.table import Table

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.report import Report
from jaxinfer.compiled.options import COMMON, LARGE_WEIGHTS, compiler_options
from jaxinfer.pallas_kernels import Weights, activate_outputs, small_batch_linear
from jaxinfer.pallas_kernels.moe import Routing, expert_mlp, permute, top_k_gating, unpermute
from jaxinfer.pallas_kernels.weights import quantize

TOKENS, GATED_EXPERTS, WIDTH, CAPACITY = 2048, 128, 256, 32
"""The tokens, experts, features and rows per expert of the gating (DeepSpeed Inference, section V-C)."""
EXPERTS, CHOSEN = 64, 2
SHAPES = ((1024, 768), (512, 1408), (2048, 768))
ROWS = (1, 8, 64, 512)
FORMATS = ("float32", "bfloat16", "int8")
ROUTINGS = 16  # that calls take in turn, so that their experts are in no cache

type Timed = Callable[[int], Any]
"""Starts the call of a round."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """Dense gated MLPs, of which calls take one after the other. Each pair: gate and up [2F, D], down [D, F]."""

    pairs: list[tuple[Weights, Weights]]

    @property
    def bytes(self) -> int:
        """Bytes of the weights of one."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.pairs[0]))


def by_one_hot(x: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dispatch and combine by matmuls with one-hot masks, as in GShard (arXiv:2006.16668)."""
    probs = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=1), GATED_EXPERTS)
    position = (jnp.cumsum(chosen, axis=0) - 1) * chosen
    slot = jnp.sum(position, axis=1).astype(jnp.int32)
    mask = (chosen * (position < CAPACITY))[..., None] * jax.nn.one_hot(slot, CAPACITY)[:, None]
    rows = jnp.einsum("sec,sm->ecm", mask, x)
    combine = jnp.sum(probs * chosen, axis=1)[:, None, None] * mask
    return rows.reshape(-1, WIDTH), jnp.einsum("sec,ecm->sm", combine, rows)


def by_table(x: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dispatch and combine by index tables and copies of rows."""
    routing = top_k_gating(logits, 1, capacity=CAPACITY, normalize=False)
    rows = permute(x, routing)
    return rows, unpermute(rows, routing)


def take_turns(calls: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each call, in rounds in which all take turns, after one unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(turn))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def gating(report: Report, rounds: int) -> None:
    """Compare the tables with the masks, by FLOPs and by time."""
    rng = np.random.default_rng(0)
    x, logits = (jnp.asarray(rng.normal(size=(TOKENS, n)), jnp.float32) for n in (WIDTH, GATED_EXPERTS))
    compiled = {call.__name__: jax.jit(call).lower(x, logits).compile() for call in (by_one_hot, by_table)}
    results = [jax.device_get(program(x, logits)) for program in compiled.values()]
    for masked, gathered in zip(*results, strict=True):
        np.testing.assert_allclose(masked, gathered, rtol=1e-4, atol=1e-5)
    flops = {name: _flops(program) for name, program in compiled.items()}
    ms = take_turns({name: lambda _, run=run: run(x, logits) for name, run in compiled.items()}, rounds)
    for name in compiled:
        report.row(figure="gating", way=name, flops=flops[name], ms=round(ms[name], 3))
    report.check("gating_flops_ratio", flops["by_one_hot"] / flops["by_table"], "x", target=6.0)
    report.check("gating_time_ratio", ms["by_one_hot"] / ms["by_table"], "x", target=6.0)


def _flops(program: jax.stages.Compiled) -> float:
    """Return XLA's count."""
    costs = program.cost_analysis()
    assert costs is not None
    return costs["flops"]


def stored(matrices: jax.Array, fmt: str) -> Weights:
    """The matrices in a format of weights."""
    return quantize(matrices, "int8") if fmt == "int8" else Weights(matrices.astype(fmt))


def normal(seed: int, *shape: int) -> jax.Array:
    """Return random matrices whose products keep the size of what they multiply."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def dense_mlp(x: jax.Array, gate_up: Weights, down: Weights) -> jax.Array:
    """Compute an MLP that all tokens have."""
    return small_batch_linear(activate_outputs(small_batch_linear(x, gate_up), "silu", gated=True), down)


def all_experts(x: jax.Array, routing: Routing, gate_up: Weights, down: Weights) -> jax.Array:
    """Compute every expert for all tokens, in a loop, and weigh what they have chosen."""

    def add(expert: jax.Array, y: jax.Array) -> jax.Array:
        share = jnp.sum(jnp.where(routing.experts == expert, routing.weights, 0.0), axis=1)
        pair = jax.tree.map(lambda leaf: leaf[expert], (gate_up, down))
        return y + share[:, None].astype(x.dtype) * dense_mlp(x, *pair)

    return jax.lax.fori_loop(0, EXPERTS, add, jnp.zeros_like(x))


def of_size(experts: int, width: int, hidden: int, fmt: str) -> Dense:
    """Make dense MLPs as large as some experts, at least two, and together as large as all experts."""
    count, size = max(2, EXPERTS // experts), experts * hidden
    gate_up, down = normal(2, 2 * size, width), normal(3, width, size)
    return Dense([(stored(gate_up + i, fmt), stored(down + i, fmt)) for i in range(count)])


def mlps(report: Report, width: int, hidden: int, fmt: str, rounds: int) -> None:
    """Time an MLP of experts beside a dense one as large as the experts that its rows touch, up to 48.

    With more rows than experts, beside one of the active size: the FLOPs that are necessary.
    """
    gate_up, down = stored(normal(0, EXPERTS, 2 * hidden, width), fmt), stored(normal(1, EXPERTS, width, hidden), fmt)
    mixed = functools.partial(expert_mlp, activation="silu", gated=True)
    for rows in ROWS:
        x = normal(4, rows, width).astype("bfloat16" if fmt == "bfloat16" else "float32")
        gate = jax.jit(functools.partial(top_k_gating, k=CHOSEN))
        routings = [gate(normal(5 + seed, rows, EXPERTS)) for seed in range(ROUTINGS)]
        touched = statistics.mean(int(jnp.sum(routing.sizes > 0)) for routing in routings)
        dense = of_size(CHOSEN if rows > EXPERTS else min(round(touched), 48), width, hidden, fmt)
        options = COMMON | compiler_options("cpu", rows=rows, dtype=jnp.dtype(fmt), weight_bytes=LARGE_WEIGHTS)
        run_dense = jax.jit(dense_mlp).lower(x, *dense.pairs[0]).compile(options)
        run_mixed = jax.jit(mixed).lower(x, routings[0], gate_up, down).compile(options)
        calls: dict[str, Timed] = {
            "dense": lambda turn, call=run_dense, x=x, pairs=dense.pairs: call(x, *pairs[turn % len(pairs)]),
            "experts": functools.partial(_with_experts, run_mixed, x, routings, gate_up, down),
        }
        if fmt == "float32" and (width, hidden) == SHAPES[0]:
            run_all = jax.jit(all_experts).lower(x, routings[0], gate_up, down).compile(options)
            calls["all experts"] = functools.partial(_with_experts, run_all, x, routings, gate_up, down)
        ms = take_turns(calls, rounds)
        read = touched / EXPERTS * sum(leaf.nbytes for leaf in jax.tree.leaves((gate_up, down)))
        report.row(
            figure="mlp",
            width=width,
            hidden=hidden,
            format=fmt,
            rows=rows,
            touched=round(touched, 1),
            dense_gb_per_s=round(dense.bytes / ms["dense"] / 1e6, 1),
            experts_gb_per_s=round(read / ms["experts"] / 1e6, 1),
            **{name.replace(" ", "_") + "_ms": round(value, 3) for name, value in ms.items()},
            ratio=round(ms["experts"] / ms["dense"], 3),
        )


def _with_experts(
    call: Callable[..., jax.Array], x: jax.Array, routings: list[Routing], gate_up: Weights, down: Weights, turn: int
) -> jax.Array:
    return call(x, routings[turn % len(routings)], gate_up, down)


def print_mlps(report: Report) -> None:
    """Print a row for each MLP."""
    columns = ("width", "hidden", "format", "rows", "touched", "dense_ms", "experts_ms", "ratio", "all_experts_ms")
    shown = (name.removesuffix("_ms").replace("_", " ") for name in columns)
    table = Table(*shown, title="milliseconds of an MLP of 64 experts, two to a token")
    for row in report.rows:
        if row["figure"] == "mlp":
            table.add_row(*(str(row.get(column, "")) for column in columns))
    rich.print(table)


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure all, and check the MLPs in float32 by their largest ratio."""
    rounds = 3 * args.rounds
    gating(report, rounds)
    for width, hidden in SHAPES:
        for fmt in FORMATS:
            mlps(report, width, hidden, fmt, rounds)
            report.save(args.json)
    print_mlps(report)
    rows = [row for row in report.rows if row["figure"] == "mlp" and row["format"] == "float32"]
    for name, count in (("active", 1), ("touched", 8)):
        ratio = max(row["ratio"] for row in rows if row["rows"] == count)
        report.check(f"mlp_vs_dense_{name}", ratio, "x", target=1.5, better="lower")
    measured = ReadBandwidth()
    measured.measure()
    bandwidth = measured.best
    for row in rows:
        if row["rows"] <= 8:
            fraction = round(row["experts_gb_per_s"] / bandwidth, 3)
            sizes = {name: row[name] for name in ("width", "hidden", "rows")}
            report.row(figure="moe_bytes_fraction", **sizes, fraction=fraction, read_gb_per_s=round(bandwidth, 1))
    faster = min(row["all_experts_ms"] / row["experts_ms"] for row in rows if "all_experts_ms" in row)
    report.check("grouped_vs_all_experts", faster, "x", target=1.0)
