"""What the host takes of a decode step, and a warm start of the whole command."""

import argparse
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks.report import Report
from benchmarks.workers import JAXINFER


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
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=2,
                    kv_heads=2,
                    head_dim=32,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=32),
                ),
                mlp=c.MlpConfig(hidden=128, activation=c.Activation.SILU, gated=True),
            ),
        ),
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
    sampling = ("--temperature", "0.8", "--top-p", "0.95")
    command = [JAXINFER, "generate", demo, "--prompt", "import os\n", *sampling, "--max-tokens"]
    subprocess.run([*command, "16"], check=True, stdout=subprocess.DEVNULL)
    start = time.perf_counter()
    subprocess.run([*command, "16"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure both."""
    report.check("host_overhead_ms", 1e3 * host_overhead(), "ms", target=0.3, better="lower")
    report.check("demo_warm_start_s", demo_start(args.demo), "s", target=10, better="lower")
