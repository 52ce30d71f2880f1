"""`jaxinfer bench`: the speed of a model directory on this machine without a server, or of a server under load."""

from typing import Annotated

import typer

from jaxinfer.cli.bench.files import check_files
from jaxinfer.cli.bench.options import (
    PROMPT_TOKENS,
    REQUESTS,
    JsonOption,
    OutputTokensOption,
    PlotOption,
    PromptTokensOption,
    RequestsOption,
    SeedOption,
    SpreadOption,
    check_context,
    check_length,
    check_prompts_file,
    check_spread,
    parse_batch_sizes,
    read_config,
)
from jaxinfer.cli.bench.serve import serve
from jaxinfer.cli.common import (
    ContextOption,
    DeviceMemoryOption,
    DiskKVLimitOption,
    DiskKVOption,
    DtypeOption,
    HostKVOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    KVOffloadOption,
    LayerFilesOption,
    MeshOption,
    ModelArgument,
    PrefetchOption,
    PromptsFileOption,
    QuantizeOption,
    SpeculationOption,
    WeightsOption,
    load_llm,
)
from jaxinfer.progress import long_work

app = typer.Typer(no_args_is_help=True, help="Measure how fast a model or a server generates.")
app.command()(serve)


@app.command()
def latency(
    ctx: typer.Context,
    model: ModelArgument,
    batch: Annotated[str, typer.Option(help="Batch sizes to measure, separated by commas.")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Number of random tokens per prompt.")] = PROMPT_TOKENS,
    output_tokens: OutputTokensOption = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured batches of each size.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Number of unmeasured batches of each size that run first.")] = 2,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    host_kv: HostKVOption = None,
    disk_kv: DiskKVOption = None,
    disk_kv_limit: DiskKVLimitOption = None,
    kv_offload: KVOffloadOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure latency, one batch at a time.

    The next batch starts when all requests of the last have finished. End-to-end is the time of the complete call. Time
    to first token is per request, from queueing. Time per output token is a request's mean after the first token.
    Inter-token latency is measured in separate rounds that stream one token per step, because a step otherwise
    generates several tokens.
    """
    batches = parse_batch_sizes(batch)
    check_files(json_file, plot)
    with long_work(f"loading {model}"):
        check_length(prompt_tokens, output_tokens, check_context(read_config(model), context))
        from jaxinfer.cli.bench import measure, report, tables
        from jaxinfer.compiled.cpu_library import build_library

        build_library()
        llm = load_llm(ctx, max_batch=max(batches))
    with long_work("rounds", total=len(batches) * (warmup + rounds)) as work:
        results, warm_up = measure.measure_latency(
            llm,
            batches,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            warmup=warmup,
            seed=seed,
            progress=work.advance,
        )
    tables.print_tables([tables.latency_table(results, prompt_tokens)], warm_up)
    if json_file:
        report.write_report(json_file, ctx, llm, warm_up, report.latency_metrics(results))
    if plot:
        from jaxinfer.cli.bench.plots import caption_of, draw_latency, write_plot

        load = f"{prompt_tokens} prompt and {output_tokens} output tokens"
        write_plot(plot, draw_latency(results, caption_of(llm, model, load)))


@app.command()
def throughput(
    ctx: typer.Context,
    model: ModelArgument,
    requests: RequestsOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = 64,
    spread: SpreadOption = 0.5,
    prompts_file: PromptsFileOption = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of sequences in a batch.")] = 64,
    warmup: Annotated[int, typer.Option(min=1, help="Number of unmeasured runs of the same lengths before.")] = 1,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    num_speculative_tokens: SpeculationOption = 0,
    kv_dtype: KVDtypeOption = None,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    host_kv: HostKVOption = None,
    disk_kv: DiskKVOption = None,
    disk_kv_limit: DiskKVLimitOption = None,
    kv_offload: KVOffloadOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure throughput of requests queued at once.

    It times until the last has finished. A request's times start at queueing, so they include the wait for a free slot.
    Time per output token is a request's mean after the first token. Prompts are encoded before the clock starts.
    """
    check_spread(spread)
    check_prompts_file(prompts_file, prompt_tokens)
    check_files(json_file, plot)
    with long_work(f"loading {model}"):
        limit = check_context(config := read_config(model), context)
        import numpy as np

        from jaxinfer.cli.bench import measure, report, tables
        from jaxinfer.cli.bench.workload import draw_prompts, encode_prompts, make_requests
        from jaxinfer.compiled.cpu_library import build_library

        rng = np.random.default_rng(seed)
        if prompts_file is None:
            prompt_tokens = prompt_tokens or PROMPT_TOKENS
            prompts = draw_prompts(rng, config.vocab, prompt_tokens, spread, requests or REQUESTS)
        else:
            prompts = encode_prompts(prompts_file, requests, model, config.vocab)
        workload = make_requests(rng, prompts, output_tokens, spread, context=limit)
        build_library()
        llm = load_llm(ctx, max_batch=max_batch)
    with long_work("warm-up, then output tokens", total=sum(r.output_tokens for r in workload)) as work:
        # Another seed, so that the warm-up leaves none of these prompts in the prefix cache.
        result, warm_up = measure.measure_throughput(
            llm, workload, warmup=warmup, seed=seed + 1, progress=lambda finished, tokens: work.update(done=tokens)
        )
    tables.print_tables(tables.throughput_tables(result), warm_up)
    if json_file:
        settings = {"requests": len(workload), "prompt_tokens": prompt_tokens}
        report.write_report(json_file, ctx, llm, warm_up, report.throughput_metrics(result), **settings)
    if plot:
        from jaxinfer.cli.bench.plots import caption_of, draw_throughput, write_plot

        load = f"{len(workload)} requests, {result.prompt_tokens:,} prompt and {result.output_tokens:,} output tokens"
        write_plot(plot, draw_throughput(result, caption_of(llm, model, load)))
