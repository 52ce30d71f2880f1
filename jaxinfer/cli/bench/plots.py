"""The plots of a run, drawn without pyplot, so without a display."""

import datetime
from pathlib import Path

from matplotlib.figure import Figure

from jaxinfer.cli.bench.files import write_file
from jaxinfer.cli.bench.results import METRICS, LatencyResult, Throughput
from jaxinfer.compiled.machine import machine
from jaxinfer.evaluation.figures import OURS, SEQUENCE, finish, legend_outside, render
from jaxinfer.evaluation.serving.figures import LATENCIES, Samples
from jaxinfer.generation import LLM


def write_plot(file: Path, figure: Figure) -> None:
    """Write a figure in the format of the file's suffix, and say so on stderr."""
    write_file(file, render(figure, file.suffix[1:]))


def caption_of(llm: LLM, model: Path, load: str) -> str:
    """Describe what was measured: the model, the load, the machine and the day."""
    where, weights = machine(), llm.model.weights
    device = f"{where['cpu']}, {where['cores']} cores" if where["platform"] == "cpu" else where["device"]
    form = f"{weights.dtype}, {weights.quantized}" if weights.quantized else str(weights.dtype)
    return f"{model.resolve().name} ({form}), {load}; {device}; {datetime.date.today()}"


def draw_latency(results: list[LatencyResult], caption: str) -> Figure:
    """Draw cumulative distributions: a panel per metric, a line per batch size."""
    shown = [field for field in METRICS if getattr(results[0], field)]
    figure = Figure(figsize=(1 + 3.2 * len(shown), 3.5), layout="constrained")
    for axes, field in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for place, result in enumerate(results):
            milliseconds = [1e3 * value for value in getattr(result, field)]
            axes.ecdf(milliseconds, label=f"batch {result.batch}", color=SEQUENCE[place % len(SEQUENCE)])
        axes.set(title=METRICS[field], xlabel="ms", ylabel="fraction of samples", xlim=(0, None))
    legend_outside(figure, *figure.axes)
    return finish(figure, caption)


def draw_throughput(result: Throughput, caption: str) -> Figure:
    """Draw the output tokens over time and, beside it, cumulative distributions of the requests' times."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    over_time, fractions = figure.subplots(1, 2)
    seconds, tokens = zip((0.0, 0), *result.timeline, strict=True)
    over_time.step(seconds, tokens, where="post", color=OURS)
    over_time.set(title=f"{result.output_tokens_per_s:,.0f} tokens/s", xlabel="s", ylabel="output tokens")
    for field, colour in zip(("first_token_s", "end_to_end_s"), SEQUENCE, strict=False):
        fractions.ecdf(getattr(result, field), label=METRICS[field], color=colour)
    fractions.set(title="requests", xlabel="s from queueing", ylabel="fraction of requests", xlim=(0, None))
    for axes in (over_time, fractions):
        axes.locator_params(axis="x", nbins=6)
    legend_outside(figure, fractions)
    return finish(figure, caption)


def draw_load(samples: Samples, caption: str) -> Figure:
    """Draw cumulative distributions of a load's latencies, a panel each."""
    shown = [name for name in LATENCIES if getattr(samples, name)]
    figure = Figure(figsize=(1 + 2.6 * max(len(shown), 1), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0] if shown else (), shown, strict=True):
        axes.ecdf(getattr(samples, name), color=OURS)
        unit = "events" if name == "itl_ms" else "requests"
        axes.set(title=LATENCIES[name], xlabel="ms", ylabel=f"fraction of {unit}", xlim=(0, None))
    return finish(figure, caption)
