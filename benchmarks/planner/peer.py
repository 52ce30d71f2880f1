"""AISimulate, a simulator with measured kernels, on the public points that the planner predicts too.

The points are the throughputs of dense models in `benchmarks/data/public_points.toml`. AISimulate runs in an
environment of its own (`make aisimulate`); without one the part is left out. Its versions on PyPI that are not marked
as development are empty.
"""

import json
import statistics
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_figures import public
from benchmarks.planner.settings import Settings
from benchmarks.report import Report

MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
}
"""What AISimulate calls the models; 3.3 has the shape of 3.1."""
CONCURRENCY = 1024
SECONDS = 300


def peer(report: Report, settings: Settings) -> None:
    """Predict each point with AISimulate, and report both errors."""
    command = settings.aisimulate_python.parent / "aisimulate"
    if not command.exists():
        print(f"No AISimulate at {command}: make aisimulate, or give --aisimulate-python.", flush=True)
        return
    table = tomllib.loads(public.FILE.read_text())["tensorrt-llm"]
    rows = [row for row in table["rows"] if row[0] in MODELS]
    ours = {(*row[:-1],): each["predicted"] for row, each in zip(table["rows"], public.loads(table), strict=True)}
    errors: dict[str, list[float]] = {"aisimulate": [], "jaxinfer": []}
    for row in rows[:1] if settings.quick else rows:
        name, _, tensor, prompt, generate, measured = row
        made = {"aisimulate": predict(command, name, tensor, prompt, generate), "jaxinfer": ours[(*row[:-1],)]}
        for who, rate in made.items():
            errors[who].append(abs(rate / measured - 1))
        what = f"{name}, {tensor} H200, {prompt}/{generate}"
        report.row(figure="peer", name=what, measured=measured, **{who: round(rate) for who, rate in made.items()})
    medians = {who: round(statistics.median(found), 4) for who, found in errors.items()}
    worst = {f"{who}_worst": round(max(found), 4) for who, found in errors.items()}
    report.row(figure="peer_errors", points=len(errors["jaxinfer"]), **medians, **worst)


def predict(command: Path, model: str, tensor: int, prompt: int, generate: int) -> float:
    """Return the generated tokens a second that AISimulate predicts on H200s, with as many requests as it keeps."""
    config: dict[str, Any] = {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": prompt, "output_tokens": generate},
            "load": {"type": "concurrency", "concurrency": CONCURRENCY},
            "stop": {"requests": 2 * CONCURRENCY},
        },
        "engine": {
            "mode": "aggregated",
            "model": MODELS[model],
            "hardware": "h200_sxm",
            "backend": "trtllm",
            "gemm_quant_mode": "fp8",
            "kvcache_quant_mode": "fp8",
            "workers": {"aggregated": {"parallelism": {"tensor": tensor}, "scheduler": {"max_sequences": CONCURRENCY}}},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prediction.yaml")
        file.write_text(json.dumps(config))  # which is YAML too
        options = ["--format", "json", "--output-dir", f"{folder}/out"]
        done = subprocess.run(
            [command, "predict", "-c", file, *options], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    summary = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return float(json.loads(summary)["output_throughput_tok_s"])
