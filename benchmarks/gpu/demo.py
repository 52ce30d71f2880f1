"""The demo model through the public API, with kernels and without, in several formats.

The model is trained, so that its texts show what random weights hide. A token may differ where two are nearly as
likely.
"""

import functools
import time
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.report import ROOT
from jaxinfer.generation import LLM, SamplingParams

PROMPTS = ("def test_read(self):\n", "import os\n\nclass", "for i in range(", "x = ")
WAYS: dict[str, dict[str, Any]] = {
    "XLA, bfloat16": {"kernels": False},
    "kernels, bfloat16": {"kernels": True},
    "kernels, int8": {"kernels": True, "quantize": "int8"},
    "XLA, int8": {"kernels": False, "quantize": "int8"},
    "kernels, int4": {"kernels": True, "quantize": "int4"},
    "kernels, int8 pages": {"kernels": True, "kv_dtype": "int8"},
    "kernels, bfloat16, from the disk cache": {"kernels": True},
}


def items(context: Context) -> list[Item]:
    """List the ways; dry: two."""
    ways = list(WAYS.items())[: 2 if context.dry else None]
    return [Item(name, functools.partial(_generate, context.rows, name, way, dry=context.dry)) for name, way in ways]


def _generate(rows: Rows, name: str, way: dict[str, Any], *, dry: bool) -> None:
    prompts = PROMPTS[: 1 if dry else None]
    start = time.perf_counter()
    llm = LLM(str(ROOT / "examples/demo_model"), dtype="bfloat16", max_batch=len(prompts), context=96, **way)
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=4 if dry else 48, ignore_eos=True)
    outputs = [llm.generate(list(prompts), params) for _ in range(2)][1]
    tokens = [output.outputs[0].token_ids for output in outputs]
    rows.row(
        part="demo",
        what=name,
        platform=jax.default_backend(),
        load_s=round(loaded - start, 2),
        generate_s=round(time.perf_counter() - loaded, 2),
        same_as_first=_same(rows, tokens),
        text=outputs[0].outputs[0].text,
        tokens=tokens,
    )


def _same(rows: Rows, tokens: list[Any]) -> float:
    """Return the fraction of tokens that the first way of this run has too."""
    first = next((row["tokens"] for row in rows.read() if row["part"] == "demo" and "tokens" in row), tokens)
    return round(float(np.mean(np.array(first) == np.array(tokens))), 3)
