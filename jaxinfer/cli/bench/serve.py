"""`jaxinfer bench serve`: a load on a server that speaks the OpenAI API."""

import asyncio
import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.bench.files import check_files, write_file
from jaxinfer.cli.bench.options import PROMPT_TOKENS, REQUESTS, PlotOption, SeedOption, SpreadOption, check_spread
from jaxinfer.cli.common import api_key, is_url, note, server_of
from jaxinfer.cli.display import figure, show, table
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    import numpy as np

    from jaxinfer.evaluation.serving.client import LoadRequest, RequestRecord
    from jaxinfer.evaluation.serving.figures import LoadSummary, Objective

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Words of random prompts; most tokenizers have a token for each."""


def serve(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(help="Server, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="Name of the model there (default: the first one).")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = REQUESTS,
    rate: Annotated[
        float | None, typer.Option(help="Poisson arrivals at this mean of requests/s (default: all at once).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals of a trace, at the trace's own rate or at a mean of --rate.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="So many requests at a time, the next when one has ended.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean number of random words per prompt.")] = PROMPT_TOKENS,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean number of tokens to generate.")] = 64,
    spread: SpreadOption = 0.0,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Milliseconds to the first token within which a request is good.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Milliseconds per output token within which a request is good.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a request is given up.")] = 600.0,
    seed: SeedOption = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write metrics and settings as JSON to this file.")
    ] = None,
    plot: PlotOption = None,
) -> None:
    """Measure a server under load.

    It streams from /v1/completions. Figures are those of `vllm bench serve`: TTFT, TPOT, ITL (between events) and E2E,
    in ms. In an open loop they count from a request's arrival. An API key comes from JAXINFER_API_KEY.
    """
    _check(rate, trace, concurrency, slo_ttft, slo_tpot, timeout)
    if not is_url(url):
        raise ValueError(f"{url} must begin with http:// or https://, as in http://127.0.0.1:8000.")
    server = server_of(url)
    check_spread(spread)
    check_files(json_file, plot)
    import numpy as np

    from jaxinfer.evaluation.serving.figures import Objective

    made = make_load(np.random.default_rng(seed), requests, rate, trace, prompt_tokens, output_tokens, spread)
    name, records = asyncio.run(_run(server, model, timeout, made, concurrency))
    report_load(ctx, name, records, Objective(ttft_ms=slo_ttft, tpot_ms=slo_tpot), json_file, plot)


async def _run(
    url: str, model: str | None, timeout: float, load: "list[LoadRequest]", concurrency: int | None
) -> "tuple[str, list[RequestRecord]]":
    """Run a load; return the model's name, and what happened to each request. Raises ValueError."""
    from jaxinfer.evaluation.serving.client import CompletionClient
    from jaxinfer.evaluation.serving.load import run_closed, run_open

    async with CompletionClient(url, model=model or "", api_key=api_key(), timeout=timeout) as client:
        client.model = model or await client.find_model()
        with long_work("requests", total=len(load)) as work:
            if concurrency is None:
                return client.model, await run_open(client, load, work.advance)
            return client.model, await run_closed(client, load, concurrency, work.advance)


def report_load(
    ctx: typer.Context,
    model: str,
    records: "list[RequestRecord]",
    objective: "Objective",
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Print the figures of a load, and write its files. Raises ValueError if no request came to its end."""
    from jaxinfer.evaluation.serving.figures import Samples, summarise

    summary, title = summarise(records, objective), f"{model} at {ctx.params['url']}"
    print_summary(summary, title)
    if failed := next((record for record in records if record.error), None):
        note(f"The first error: {failed.error}: {failed.message}")
    if json_file:
        write_file(json_file, _report(ctx, model, summary))
    if plot:
        from jaxinfer.cli.bench.plots import draw_load, write_plot

        write_plot(plot, draw_load(Samples.from_records(records), f"{title}, {len(records)} requests"))
    if not summary.requests:
        raise ValueError(f"No request came to its end at {ctx.params['url']}.")


def _check(rate: float | None, trace: Path | None, concurrency: int | None, *positive: float | None) -> None:
    """Raise ValueError for options that contradict each other, or that are not above 0."""
    if concurrency is not None and (rate is not None or trace is not None):
        raise ValueError("--concurrency contradicts --rate and --trace: a closed loop has no arrivals.")
    names = ("--rate", "--slo-ttft", "--slo-tpot", "--timeout")
    for name, value in zip(names, (rate, *positive), strict=True):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {value}.")


def make_load(
    rng: "np.random.Generator",
    count: int,
    rate: float | None,
    trace: Path | None,
    prompt_tokens: int,
    output_tokens: int,
    spread: float,
) -> "list[LoadRequest]":
    """Draw the requests of a load. Raises ValueError for a trace with fewer."""
    from jaxinfer.cli.bench.workload import spread_lengths
    from jaxinfer.evaluation.serving.arrivals import TracedRequest, at_rate, poisson, read_arrivals
    from jaxinfer.evaluation.serving.client import LoadRequest

    if trace is not None:
        items = read_arrivals(trace)[:count]
        if len(items) < count:
            raise ValueError(f"--requests {count} is more than the {len(items)} arrivals in {trace}.")
        items = items if rate is None else at_rate(items, rate)
    else:
        items = [TracedRequest(arrival=0.0)] * count if rate is None else poisson(rate, count, rng)
    prompts, outputs = (spread_lengths(rng, mean, spread, count) for mean in (prompt_tokens, output_tokens))
    return [
        LoadRequest(
            prompt=" ".join(rng.choice(WORDS, item.prompt_tokens or prompt)),
            output_tokens=item.output_tokens or output,
            arrival=item.arrival,
        )
        for item, prompt, output in zip(items, prompts, outputs, strict=True)
    ]


def print_summary(summary: "LoadSummary", title: str) -> None:
    """Print a table of rates, one of latencies, and a line for each kind of error."""
    from jaxinfer.evaluation.serving.figures import LATENCIES, PERCENTILES

    rates = {
        "requests": str(summary.requests),
        "seconds": figure(summary.seconds),
        "requests/s": figure(summary.requests_per_s),
        "output tokens/s": figure(summary.output_tokens_per_s),
    }
    if summary.goodput is not None:
        rates["good requests/s"] = figure(summary.goodput)
    speeds = table(*rates, figures=len(rates), title=title)
    speeds.add_row(*rates.values())
    ranks = [f"p{rank}" for rank in PERCENTILES]
    latencies = table("ms", *ranks, figures=len(ranks))
    for name, values in summary.percentiles.items():
        latencies.add_row(LATENCIES[name], *(figure(values[rank]) for rank in ranks))
    show(speeds, latencies)
    print(f"The client sent 99% of the requests within {figure(summary.client_lag_ms)} ms of their arrival.")
    for kind, count in summary.errors.items():
        print(f"{count} failed: {kind}")


def _report(ctx: typer.Context, model: str, summary: "LoadSummary") -> bytes:
    settings = {name: value for name, value in ctx.params.items() if name not in ("url", "model", "json_file", "plot")}
    versions = {name: importlib.metadata.version(name) for name in ("jaxinfer", "httpx2")}
    report: dict[str, Any] = {
        "command": "bench serve",
        "url": ctx.params["url"],
        "model": model,
        "versions": {"python": platform.python_version(), **versions},
        "settings": settings,
        "metrics": dataclasses.asdict(summary),
    }
    return (json.dumps(report, indent=1, default=str) + "\n").encode()
