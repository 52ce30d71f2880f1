"""Layers streamed from pinned host memory: how close a pass comes to the link, and to the rate of products.

Not yet run on a GPU. The device may have half of the model's bytes. A pass over one token takes as long as copying the
layers; one over many tokens as long as multiplying (DeepSpeed Inference, figures 9b and 10c).
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.streaming.models import write_hf
from benchmarks.streaming.run_jaxinfer import run
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.prediction import COPIED_BYTES, measure_host_copy

FULL: dict[str, int] = {"num_hidden_layers": 16, "hidden_size": 4096, "intermediate_size": 11008}
FULL |= {"num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2}
PROMPT, ROWS, TINY_ROWS = 256, 64, 2


def items(context: Context) -> list[Item]:
    """List the only item: its model is made first."""
    return [Item("layers from pinned host memory", functools.partial(measure, context.rows, dry=context.dry))]


def measure(rows: Rows, *, dry: bool) -> None:
    """Measure copy bandwidth, then passes of one token and of many, with prefetched layers and without."""
    size = 1 << 20 if dry else COPIED_BYTES
    bandwidth = measure_host_copy(jax.local_devices()[:1], size)
    rows.row(part="streaming", what="pinned host to device", rate=round(bandwidth / 1e9, 2), unit="GB/s")
    with tempfile.TemporaryDirectory() as folder:
        write_hf(hf := Path(folder) / "hf", TINY if dry else FULL)
        convert(hf, model := Path(folder) / "model", dtype="bfloat16")
        opened = open_model(model, dtype="bfloat16")
        memory = (
            {"weights": "host", "device_memory": opened.bytes_per_device() // 2} if not dry else {"weights": "host"}
        )
        settings: dict[str, Any] = {**memory, "dtype": "bfloat16", "context": 512, "kernels": not dry}
        for prefetch in (1, 0):
            result = run(str(model), {**settings, "prefetch": prefetch, "batch": 1, "prompt": 64, "passes": 8})
            _row(rows, "one token", prefetch, result)
            if prefetch:
                moved = sum(result["bytes"].values()) / sum(result["seconds"][1:])
                rows.check("streaming_of_link", moved / bandwidth, "of the copies' bandwidth", target=0.85)
        batch = TINY_ROWS if dry else ROWS
        for prefetch in (1, 0):
            many = {
                "batch": batch,
                "prompt": PROMPT,
                "passes": 1,
                "chunk_size": 64,
                "token_budget": batch * PROMPT // 2,
            }
            result = run(str(model), {**settings, "prefetch": prefetch, **many})
            _row(rows, f"{many['token_budget']} tokens", prefetch, result)
            if prefetch:
                rate = 2 * opened.parameters_per_device * many["token_budget"] * (len(result["seconds"]) - 1)
                rate /= sum(result["seconds"][1:])
                peak = Ceilings.from_rows(rows.read()).flops["bfloat16"]
                rows.check("streaming_of_products", rate / peak, "of the rate of products", target=0.5)


def _row(rows: Rows, what: str, prefetch: int, result: dict[str, Any]) -> None:
    rows.row(
        part="streaming",
        what=what,
        prefetch=prefetch,
        ms=round(1e3 * sum(result["seconds"][1:]) / max(len(result["seconds"]) - 1, 1), 3),
        overlap=round(result["overlap"], 3),
    )
