"""The machine of a run: packages, the device, one program of XLA's as a CUDA graph, and copies from pinned memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.report import Report, version
from jaxinfer.compiled import compiler_options
from jaxinfer.pallas_kernels.dispatch import kernels_available
from jaxinfer.streaming.prediction import COPIED_BYTES, measure_host_copy

OTHERS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "transformers", "triton")
"""Packages besides ours whose versions matter."""


def items(context: Context) -> list[Item]:
    """List what is asked of every machine."""
    size = 1 << 16 if context.dry else COPIED_BYTES
    return [
        Item("packages and device", functools.partial(_describe, context.rows)),
        Item("a loop of XLA's", functools.partial(_run_a_loop, context.rows)),
        Item(
            "copies from pinned memory",
            functools.partial(_copy, context.rows, size),
        ),
    ]


def _describe(rows: Rows) -> None:
    device = jax.devices()[0]
    described = Report({name: found for name in OTHERS if (found := version(name)) != "not installed"}).result()
    fields = {name: described[name] for name in ("machine", "commit", "date", "versions")}
    memories = [memory.kind for memory in device.addressable_memories()]
    rows.row(part="machine", kernels=kernels_available(), memory=device.memory_stats(), memories=memories, **fields)


def _run_a_loop(rows: Rows) -> None:
    """Run a loop with the options of the engine's programs: it needs ptxas, libdevice and the graphs of the driver."""
    x = jnp.eye(512, dtype=jnp.bfloat16)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x))
    options = compiler_options(jax.default_backend(), rows=1, dtype=np.dtype(jnp.bfloat16))
    compiled = loop.lower(x).compile(options)
    sums = [float(jnp.sum(compiled(x), dtype=jnp.float32)) for _ in range(4)]  # the first runs are not from a graph
    value = "the same in all runs" if len(set(sums)) == 1 else f"differs between runs: {sums}"
    rows.row(part="machine", what="a loop of XLA's", value=value, options=options)


def _copy(rows: Rows, size: int) -> None:
    rate = measure_host_copy(jax.local_devices()[:1], size) / 1e9
    rows.row(part="machine", what="copies from pinned memory", value=f"{rate:.4g} GB/s")
