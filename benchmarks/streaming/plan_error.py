"""The prediction of `jaxinfer plan` for a pass, against measured passes, on one device and on two.

It also runs in a process of its own, since the number of CPU devices is fixed when JAX starts: `plan_error.py MODEL
TENSOR` prints one JSON object: seconds of a pass over one token as predicted and as measured, and their parts.
"""

import dataclasses
import json
import statistics
import sys

from benchmarks.report import Report
from benchmarks.streaming.models import write_hf
from benchmarks.streaming.ours import CONTEXT, PROMPT, decode_seconds, drop_pages
from benchmarks.streaming.run_jaxinfer import run
from benchmarks.streaming.settings import Settings
from benchmarks.workers import run_module
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.placement import plan_placement
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.sharding.planner import Fetched
from jaxinfer.streaming.config import MemoryConfig
from jaxinfer.streaming.layer_folders import write_layer_files
from jaxinfer.streaming.prediction import plan_pass

LAYERS, QUICK_LAYERS = 6, 2
"""Number of layers of 128 MiB, so that fetching takes longest, and a pass is long enough to see the disk's speed."""
TENSOR = (1, 2)
PASSES = 8


def plan_error(report: Report, settings: Settings) -> None:
    """Compare the median errors on one device and on a mesh; each prediction is made before the passes."""
    write_hf(hf := settings.folder / "plan_hf", {"num_hidden_layers": QUICK_LAYERS if settings.quick else LAYERS})
    convert(hf, model := settings.folder / "plan")
    errors: dict[int, list[float]] = {tensor: [] for tensor in TENSOR}
    for _ in range(settings.rounds):
        for tensor in TENSOR:
            drop_pages(model)
            devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(tensor)}
            result = run_module("benchmarks.streaming.plan_error", str(model), str(tensor), **devices)
            errors[tensor].append(abs(result["predicted"] / result["measured"] - 1))
            report.row(figure="plan", tensor=tensor, error=round(errors[tensor][-1], 4), **result)
    worst = max(statistics.median(values) for values in errors.values())
    report.check("plan_error", worst, "of a measured pass", target=0.25, better="lower")


def predict_and_measure(model: str, tensor: int) -> dict[str, float]:
    """Predict the seconds of a pass over one token before the model is loaded, and measure them."""
    mesh = None if tensor == 1 else MeshConfig(tensor=tensor)
    opened = open_model(model, mesh=mesh)
    write_layer_files(opened, opened.folder)
    placement = plan_placement(opened, EngineConfig(max_batch=1, context=CONTEXT), MemoryConfig(weights="disk"))
    assert placement is not None
    planned = plan_pass(opened, placement, context=CONTEXT)
    predicted = planned.predict(1)
    computed = dataclasses.replace(planned.runner, fetched=Fetched()).token(1, planned.context)
    sizes = {"batch": 1, "prompt": PROMPT, "passes": PASSES, "context": CONTEXT}
    result = run(model, {"weights": "disk", "mesh": mesh, **sizes})
    return {
        "predicted": round(predicted.total, 4),
        "measured": round(decode_seconds(result), 4),
        "predicted_fetch": round(planned.runner.fetched.layers_s, 4),
        "predicted_compute": round(computed.total, 4),
        "compute": round(result["compute_seconds"] / (len(result["seconds"]) - 1), 4),
        "predicted_gb_per_s": round(planned.bandwidths["disk"] / 1e9, 3),
        "gb_per_s": round(result["bandwidth"]["disk"] / 1e9, 3),
    }


if __name__ == "__main__":
    print(json.dumps(predict_and_measure(sys.argv[1], int(sys.argv[2]))))
