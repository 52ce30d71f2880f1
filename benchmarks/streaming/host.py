"""Layers streamed from the host's memory."""

from benchmarks.report import Report
from benchmarks.streaming.ours import CAP, rounded, run_ours
from benchmarks.streaming.settings import Settings
from jaxinfer.models.files.loading import open_model


def host(report: Report, settings: Settings) -> None:
    """Stream from the host's memory to a device with 1 GiB, under a cap with 1 GiB more than both."""
    model = settings.large_model()
    model_bytes = open_model(model).bytes_per_device()
    options = {"weights": "host", "device_memory": CAP, "prefetch": 1, "count_layers": True}
    result = run_ours(model, cap=model_bytes + 2 * CAP, batch=1, **options)
    on_device = result["layer_bytes_on_device"]
    report.row(figure="host", layer_bytes_on_device=on_device, **rounded(result))
