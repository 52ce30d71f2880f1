"""`jaxinfer bench`: the speed of a model directory on this machine, without a server."""

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.common import (
    DraftOption,
    DtypeOption,
    KernelsOption,
    KVDtypeOption,
    MeshOption,
    QuantizeOption,
    parse_mesh,
    read_prompts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.progress import Progress
    from rich.table import Table

    from jaxinfer.generation import LLM
    from jaxinfer.generation.measure import Latency, Throughput, WarmUp
    from jaxinfer.models import DecoderConfig

PLOT_SUFFIXES = (".png", ".svg")
PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "numpy")
PROMPT_TOKENS, REQUESTS = 128, 64  # where no file of prompts says otherwise
SECONDS_PER_DRAWING = 0.5  # of the progress bar
PIPED_WIDTH = 120  # of tables that do not go to a terminal, which rich would squeeze into 80
# Attributes of `Latency` and `Throughput`, and what tables and plots call them.
FIGURES = {
    "end_to_end_s": "end-to-end",
    "first_token_s": "time to first token",
    "per_output_token_s": "time per output token",
    "inter_token_s": "inter-token latency",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "min", "max")  # of `Distribution`

bench = typer.Typer(no_args_is_help=True, help="Measure how fast a model generates on this machine.")

ModelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)]
OutputTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate, past any end-of-text token.")]
ContextOption = Annotated[int | None, typer.Option(help="Most tokens of a sequence (default: the model's).")]
SeedOption = Annotated[int, typer.Option(min=0, help="Same seed, same prompts and lengths.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write metrics, settings and machine to this file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the measurement into this .png or .svg file.")]


@bench.command()
def latency(
    ctx: typer.Context,
    model: ModelArgument,
    batch: Annotated[str, typer.Option(help="Batch sizes, measured one after the other.")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in each prompt.")] = PROMPT_TOKENS,
    output_tokens: OutputTokensOption = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each size that are measured.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Batches of each size that run before, unmeasured.")] = 2,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    draft_tokens: DraftOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time one batch at a time: its requests start together, and the next batch when all have finished.

    End-to-end is the whole call. Time to first token is a request's, from queueing; time per output token is its mean
    after the first. Inter-token latency is the gap between tokens of a request that is streamed one token a step, in
    rounds of their own, because a step otherwise makes several tokens.
    """
    batches = _batch_sizes(batch)
    _check_files(json_file, plot)
    _check_length(prompt_tokens, output_tokens, _context(_decoder_config(model), context))
    from jaxinfer.generation.measure import measure_latency

    llm = _load(ctx, max_batch=max(batches))
    with _progress("rounds", len(batches) * (warmup + rounds)) as (bar, task):
        results, warm_up = measure_latency(
            llm,
            batches,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            warmup=warmup,
            seed=seed,
            progress=lambda: bar.update(task, advance=1, refresh=True),  # between rounds, so not in the measurement
        )
    _print([_latency_table(results, prompt_tokens)], warm_up)
    metrics = {"batches": [_latency_metrics(result) for result in results]}
    _write_json(json_file, ctx, llm, warm_up, metrics)
    _write_plot(plot, lambda: _draw_latency(results))


@bench.command()
def throughput(
    ctx: typer.Context,
    model: ModelArgument,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"How many (default: {REQUESTS}, or all of the file).", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Random tokens in a prompt (default: {PROMPT_TOKENS}).", show_default=False),
    ] = None,
    output_tokens: OutputTokensOption = 64,
    spread: Annotated[
        float, typer.Option(help="Lengths are uniform in [1 - spread, 1 + spread] times the tokens given.")
    ] = 0.5,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="One prompt a line; in a .jsonl file, one object a line with `prompt` or `token_ids`."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most sequences that run together.")] = 64,
    warmup: Annotated[int, typer.Option(min=1, help="Unmeasured runs of the same lengths before.")] = 1,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    draft_tokens: DraftOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Queue all requests at once and time until the last has finished.

    A request's times count from queueing, so they include the wait for a free slot; time per output token is its mean
    after the first. Prompts are encoded before the clock starts.
    """
    if not 0 <= spread < 1:
        raise ValueError(f"--spread must be in [0, 1), got {spread}.")
    if prompts_file is not None and prompt_tokens is not None:
        raise ValueError(
            f"--prompt-tokens {prompt_tokens} contradicts --prompts-file {prompts_file}: give one of them."
        )
    _check_files(json_file, plot)
    config = _decoder_config(model)
    limit = _context(config, context)
    import numpy as np

    from jaxinfer.generation.measure import Request, measure_throughput, random_prompts, spread_lengths

    rng = np.random.default_rng(seed)
    if prompts_file is None:
        prompt_tokens = prompt_tokens or PROMPT_TOKENS
        prompts = random_prompts(rng, config.vocab, spread_lengths(rng, prompt_tokens, spread, requests or REQUESTS))
    else:
        prompts = _encoded_prompts(prompts_file, requests, model, config.vocab)
    workload = list(map(Request, prompts, spread_lengths(rng, output_tokens, spread, len(prompts))))
    for number, request in enumerate(workload, 1):
        _check_length(len(request.prompt_ids), request.output_tokens, limit, f"Request {number}: ")

    llm = _load(ctx, max_batch=max_batch)
    with _progress("warm-up", sum(r.output_tokens for r in workload)) as (bar, task):
        show = _now_and_then(bar, task, len(workload))
        # Another seed, so that the warm-up leaves none of these prompts in a cache.
        result, warm_up = measure_throughput(llm, workload, warmup=warmup, seed=seed + 1, progress=show)
    _print(_throughput_tables(result), warm_up)
    metrics = _throughput_metrics(result)
    _write_json(json_file, ctx, llm, warm_up, metrics, requests=len(workload), prompt_tokens=prompt_tokens)
    _write_plot(plot, lambda: _draw_throughput(result))


# Options


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--batch must be integers >= 1 separated by commas, got {text!r}.")
    return sizes


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    """Refuse what could not be written after the run, before it."""
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is None:
            continue
        if file.is_dir():
            raise ValueError(f"{option} {file} is a directory; name a file.")
        if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
            raise ValueError(f"{option} {file}: {file.parent} is not a directory that can be written to.")
    if plot is None:
        return
    if plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {plot} must end in {' or '.join(PLOT_SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {plot} needs matplotlib: pip install 'jaxinfer[bench]'")


def _load(ctx: typer.Context, *, max_batch: int) -> "LLM":
    """The model, as the options that both commands have say."""
    from jaxinfer.generation import LLM

    names = ("dtype", "quantize", "context", "draft_tokens", "kv_dtype", "kernels")
    options = {name: ctx.params[name] for name in names}
    return LLM(ctx.params["model"], mesh=parse_mesh(ctx.params["mesh"]), max_batch=max_batch, **options)


def _decoder_config(directory: Path) -> "DecoderConfig":
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.loading import Description

    config = Description.read(directory).config
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{directory} holds an encoder; bench measures decoders.")
    return config


def _context(config: "DecoderConfig", context: int | None) -> int:
    if context is not None and not 1 < context <= config.context:
        raise ValueError(f"--context must be in [2, {config.context}] for this model, got {context}.")
    return context or config.context


def _check_length(prompt_tokens: int, output_tokens: int, context: int, which: str = "") -> None:
    if prompt_tokens + output_tokens > context:
        raise ValueError(
            f"{which}{prompt_tokens} prompt and {output_tokens} output tokens are more than the context of {context}; "
            "lower one of them or raise --context."
        )


def _encoded_prompts(file: Path, count: int | None, model: Path, vocab: int) -> list[list[int]]:
    """The first `count` prompts of a file, or all, as token ids."""
    from jaxinfer.generation.text import Tokenizer, encode_prompt

    prompts, tokenizer = read_prompts([], file, []), Tokenizer.of(model)
    if count is not None and count > len(prompts):
        raise ValueError(f"--requests {count} is more than the {len(prompts)} prompts in {file}.")
    encoded = []
    for number, prompt in enumerate(prompts[:count], 1):
        try:
            ids = encode_prompt(tokenizer, prompt, vocab)
        except ValueError as error:
            raise ValueError(f"{file}:{number}: {error}") from error
        if not ids:
            raise ValueError(f"{file}:{number}: the prompt is empty.")
        encoded.append(ids)
    return encoded


# Progress


@contextmanager
def _progress(description: str, total: int) -> "Iterator[tuple[Progress, Any]]":
    """A bar on stderr that is drawn only when told to: a thread that draws would take its time from the host's."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        bar.refresh()
        yield bar, task


def _now_and_then(bar: "Progress", task: Any, requests: int) -> Callable[[int, int], None]:
    """Draws the output tokens so far, seldom enough not to be seen in the measurement."""
    drawn = time.perf_counter()

    def show(finished: int, tokens: int) -> None:
        nonlocal drawn
        if (now := time.perf_counter()) - drawn > SECONDS_PER_DRAWING:
            drawn = now
            bar.update(task, description=f"{finished} of {requests} requests, tokens", completed=tokens, refresh=True)

    return show


# What is printed and written


def _columns(*names: str, title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name.startswith("ms") else "right", no_wrap=True)
    return table


def _add_distributions(table: "Table", result: "Latency | Throughput", *first: str, last: Iterable[str] = ()) -> None:
    """A row of milliseconds for each figure that has samples; `last` ends the first row."""
    from jaxinfer.generation.measure import Distribution

    for field, name in FIGURES.items():
        if found := Distribution.of(getattr(result, field, ())):
            cells = (f"{1e3 * getattr(found, statistic):,.2f}" for statistic in STATISTICS)
            table.add_row(*first, name, *cells, *last)
            first, last = ("",) * len(first), ()
    table.add_section()


def _latency_table(results: "list[Latency]", prompt_tokens: int) -> "Table":
    title = f"{prompt_tokens} prompt and {results[0].output_tokens} output tokens a request"
    table = _columns("batch", "ms", *STATISTICS, "tokens/s", title=title)
    for result in results:
        _add_distributions(table, result, str(result.batch), last=(f"{result.tokens_per_s:,.1f}",))
    return table


def _throughput_tables(result: "Throughput") -> "list[Table]":
    title = f"{result.requests} requests, {result.prompt_tokens:,} prompt and {result.output_tokens:,} output tokens"
    rates = _columns("seconds", "requests/s", "output tokens/s", "total tokens/s", title=title)
    rates.add_row(
        f"{result.seconds:,.2f}",
        f"{result.requests_per_s:,.2f}",
        f"{result.output_tokens_per_s:,.1f}",
        f"{result.total_tokens_per_s:,.1f}",
    )
    times = _columns("ms", *STATISTICS, title="of a request, from queueing")
    _add_distributions(times, result)
    return [rates, times]


def _print(tables: "list[Table]", warm_up: "WarmUp") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for table in tables:
        console.print(table)
    console.print(
        f"Not in the figures: {warm_up.seconds:.1f} s of warm-up. It compiled, or read from the disk cache, "
        f"{len(warm_up.programs)} programs: {warm_up.compile_s:.1f} s in sum, several at a time.",
        highlight=False,
    )


def _distributions(result: "Latency | Throughput") -> dict[str, Any]:
    from jaxinfer.generation.measure import Distribution

    found = {field: Distribution.of(getattr(result, field)) for field in FIGURES if hasattr(result, field)}
    return {field: dataclasses.asdict(value) if value else None for field, value in found.items()}


def _latency_metrics(result: "Latency") -> dict[str, Any]:
    return {
        "batch": result.batch,
        "rounds": len(result.end_to_end_s),
        "seconds": sum(result.end_to_end_s),
        "output_tokens": result.total_output_tokens,
        "output_tokens_per_s": result.tokens_per_s,
        **_distributions(result),
    }


def _throughput_metrics(result: "Throughput") -> dict[str, Any]:
    names = ("seconds", "requests", "prompt_tokens", "output_tokens")
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    return {**{name: getattr(result, name) for name in (*names, *rates)}, **_distributions(result)}


def _write_json(
    file: Path | None,
    ctx: typer.Context,
    llm: "LLM",
    warm_up: "WarmUp",
    metrics: dict[str, Any],
    **settings: Any,
) -> None:
    """The report of one run, if asked for. `settings` stand in for options that were left to their defaults."""
    if file is None:
        return
    from jaxinfer.generation.measure import machine

    description, weights = llm.model.description, llm.model.weights
    options = {name: value for name, value in ctx.params.items() if name not in ("model", "json_file", "plot")}
    report = {
        "command": f"bench {ctx.info_name}",
        "model": {
            "directory": str(ctx.params["model"]),
            "family": description.family,
            "layers": description.config.layers,
            "embed": description.config.embed,
            "stored": description.quantization or description.dtype,
            "dtype": str(weights.dtype),
            "quantized": weights.quantized,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "machine": machine(),
        "settings": options | settings | {"context": llm.engine.context},
        "warm_up": dataclasses.asdict(warm_up),
        "metrics": metrics,
    }
    _write(file, (json.dumps(report, indent=1, default=str) + "\n").encode())


def _write_plot(file: Path | None, draw: "Callable[[], Figure]") -> None:
    if file is None:
        return
    drawn = io.BytesIO()
    draw().savefig(drawn, format=file.suffix[1:], dpi=150)
    _write(file, drawn.getvalue())


def _write(file: Path, content: bytes) -> None:
    """All of it or nothing: a reader never finds half a file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    typer.echo(f"Wrote {file}", err=True)


# Plots: figures without pyplot, so without a display


def _draw_latency(results: "list[Latency]") -> "Figure":
    """The share of samples that took at most so long: a panel a figure, a line a batch size."""
    from matplotlib.figure import Figure

    shown = [field for field in FIGURES if getattr(results[0], field)]
    figure = Figure(figsize=(4 * len(shown), 3.5), layout="constrained")
    for axes, field in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for result in results:
            axes.ecdf([1e3 * value for value in getattr(result, field)], label=f"batch {result.batch}")
        axes.set(title=FIGURES[field], xlabel="ms", ylabel="share of samples", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _draw_throughput(result: "Throughput") -> "Figure":
    """Output tokens over time; beside it, the share of requests that took at most so long."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    over_time, shares = figure.subplots(1, 2)
    seconds, tokens = zip((0.0, 0), *result.timeline, strict=True)
    over_time.step(seconds, tokens, where="post")
    over_time.set(title=f"{result.output_tokens_per_s:,.0f} tokens/s", xlabel="s", ylabel="output tokens")
    for field in ("first_token_s", "end_to_end_s"):
        shares.ecdf(getattr(result, field), label=FIGURES[field])
    shares.set(title="requests", xlabel="s from queueing", ylabel="share of requests", xlim=(0, None))
    shares.legend()
    for axes in (over_time, shares):
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=6)
    return figure
