"""The JSON report of a run: metrics, settings, versions and machine."""

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import typer

from jaxinfer.cli.bench.files import write_file
from jaxinfer.cli.bench.results import METRICS, Distribution, LatencyResult, Throughput, WarmUp
from jaxinfer.compiled.machine import machine
from jaxinfer.generation import LLM

PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "numpy")


def latency_metrics(results: list[LatencyResult]) -> dict[str, Any]:
    """Return the report's `metrics` of `bench latency`."""
    return {
        "batches": [
            {
                "batch": result.batch,
                "rounds": len(result.end_to_end_s),
                "seconds": sum(result.end_to_end_s),
                "output_tokens": result.total_output_tokens,
                "output_tokens_per_s": result.tokens_per_s,
                **_distributions(result),
            }
            for result in results
        ]
    }


def throughput_metrics(result: Throughput) -> dict[str, Any]:
    """Return the report's `metrics` of `bench throughput`."""
    names = ("seconds", "requests", "prompt_tokens", "output_tokens")
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    idle = () if result.idle_share is None else ("idle_share",)
    return {**{name: getattr(result, name) for name in (*names, *rates, *idle)}, **_distributions(result)}


def _distributions(result: LatencyResult | Throughput) -> dict[str, Any]:
    distributions = {
        field: Distribution.from_samples(getattr(result, field)) for field in METRICS if hasattr(result, field)
    }
    return {field: dataclasses.asdict(value) if value else None for field, value in distributions.items()}


def write_report(
    file: Path, ctx: typer.Context, llm: LLM, warm_up: WarmUp, metrics: dict[str, Any], **settings: Any
) -> None:
    """Write the report to `file`. `settings` replace options that were left to their defaults."""
    description, weights = llm.model.description, llm.model.weights
    options = {name: value for name, value in ctx.params.items() if name not in ("model", "json_file", "plot")}
    report = {
        "command": f"bench {ctx.info_name}",
        "model": {
            "directory": str(ctx.params["model"]),
            "family": description.family,
            "layers": llm.model.transformer.layers,
            "embed": llm.model.transformer.embed,
            "stored": description.quantization or description.dtype,
            "dtype": str(weights.dtype),
            "quantized": weights.quantized,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "machine": machine(),
        "settings": options | settings | {"context": llm.engine.config.context},
        "warm_up": dataclasses.asdict(warm_up),
        "metrics": metrics,
    }
    write_file(file, (json.dumps(report, indent=1, default=str) + "\n").encode())
