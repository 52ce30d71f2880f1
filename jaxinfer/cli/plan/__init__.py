"""`jaxinfer plan`: how fast a model will run, here with streamed layers or on other devices, and what stages do."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.bench.files import check_plot
from jaxinfer.cli.common import (
    MODEL_HELP,
    DeviceMemoryOption,
    DtypeOption,
    HostMemoryOption,
    KVOffloadOption,
    MeshOption,
    PrefetchOption,
    QuantizeOption,
    parse_mesh,
)
from jaxinfer.cli.gantt import TERMINAL, GanttOptions, draw
from jaxinfer.cli.plan.devices import DeviceOptions, plan_devices
from jaxinfer.cli.plan.fleet import FleetOptions, plan_fleet
from jaxinfer.cli.plan.notes import cache_note, expert_note, offload_note
from jaxinfer.cli.plan.options import (
    AttentionContextOption,
    BatchOption,
    ByOption,
    ChunksOption,
    DevicesOption,
    GanttOption,
    GenerateOption,
    HitRateOption,
    MicroBatchesOption,
    NamedOption,
    PlotOption,
    PriceOption,
    PromptMicroBatchesOption,
    PromptOption,
    PromptTimeOption,
    PromptTokensOption,
    RateOption,
    SloOption,
    TokensOption,
    TraceOption,
    WriteOption,
)
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.streaming.prediction import PlannedPass

DRAWN = [field.name for field in dataclasses.fields(GanttOptions) if field.name != "stages"]
"""Options of schedules that are drawn."""
PREDICTED = (
    "model",
    "weights",
    "device_memory",
    "host_memory",
    "prefetch",
    "kv_offload",
    "context",
    "bandwidth",
    "flops",
    "dtype",
    "quantize",
)
"""Options of a model's prediction."""
OF_DEVICES = {"named": None, "batch": 1, "prompt": 512, "generate": 128, "by": "throughput", "price": None}
OF_DEVICES |= {"hit_rate": 0.0, "write": None, "plot": None}
"""Options that --devices takes, and their defaults; MODEL and --quantize too."""
OF_FLEETS = ("trace", "rate", "slo")
"""Options that size a fleet of devices."""
OF_BATCHES = ("batch", "hit_rate", "by", "plot")
"""Options of a batch on devices, of which a fleet has no use."""


def plan(
    ctx: typer.Context,
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=False)] = None,
    devices: DevicesOption = None,
    named: NamedOption = None,
    batch: BatchOption = None,
    prompt: PromptOption = None,
    generate: GenerateOption = None,
    hit_rate: HitRateOption = None,
    by: ByOption = None,
    price: PriceOption = None,
    write: WriteOption = None,
    plot: PlotOption = None,
    trace: TraceOption = None,
    rate: RateOption = None,
    slo: SloOption = None,
    weights: Annotated[
        str | None, typer.Option(help="Where layers are streamed from: host, disk, or auto (default: disk).")
    ] = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    prefetch: PrefetchOption = None,
    kv_offload: KVOffloadOption = None,
    context: Annotated[int | None, typer.Option(help="Tokens per sequence (default: the model's).")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help='Bytes per second to all devices together, such as "25GB" or "disk=3GB,host=25GB" (default: measured).'
        ),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="FLOP/s of one device (default: measured).")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    gantt: GanttOption = None,
    micro_batches: MicroBatchesOption = None,
    prompt_micro_batches: PromptMicroBatchesOption = None,
    tokens: TokensOption = None,
    prompt_time: PromptTimeOption = None,
    chunks: ChunksOption = None,
    prompt_tokens: PromptTokensOption = None,
    attention_context: AttentionContextOption = None,
) -> None:
    """Predict a model's speed, here or on other devices.

    With --devices h200:8, rank all meshes and schedules of so many devices: memory, time to the first token and
    between tokens, tokens/s, costs, and what limits each. The model is --model NAME, or MODEL, whose config is read.
    With --trace FILE --slo ttft=500ms,tpot=50ms too, size a fleet whose replicas have at most so many devices.

    Without, predict several batch sizes of a model on this machine. For streamed layers, recommend one: a pass takes as
    long as fetching layers or computing them, whichever is longer. Several devices share the disk and host memory.

    With --gantt FILE --mesh pipeline=4, draw the schedules of a pipeline instead.
    """
    if devices is not None:
        _rank(ctx, devices)
        return
    for name in _given(ctx, (*OF_DEVICES, *OF_FLEETS)):
        raise ValueError(f"{_option(name)} is only used with --devices; add --devices, such as --devices h200:8.")
    if gantt is not None:
        _draw(ctx, gantt)
        return
    for name in _given(ctx, DRAWN):
        raise ValueError(f"{_option(name)} is only used with --gantt; add --gantt FILE or --gantt -.")
    if model is None:
        raise ValueError("plan: name a model, or draw the schedules of a pipeline with --gantt FILE.")
    memory = _given(ctx, ("weights", "device_memory", "host_memory", "prefetch", "kv_offload"))
    _predict(model, mesh, memory, context, bandwidth, flops, dtype, quantize)


def _rank(ctx: typer.Context, devices: str) -> None:
    """Rank plans for devices, or size a fleet of them, by the options that were given."""
    taken = {"model", "devices", "quantize", *OF_DEVICES, *OF_FLEETS}
    for name in _given(ctx, [name for name in ctx.params if name not in taken]):
        raise ValueError(f"--devices plans for other devices: leave out {_option(name)}.")
    options = {name: default if ctx.params[name] is None else ctx.params[name] for name, default in OF_DEVICES.items()}
    folder, quantize = ctx.params["model"], ctx.params["quantize"]
    name = options.pop("named")
    given = DeviceOptions(name=name, folder=folder, devices=devices, quantize=quantize, **options)
    fleet = _given(ctx, OF_FLEETS)
    if not fleet:
        plan_devices(given)
        return
    for name in _given(ctx, OF_BATCHES):
        raise ValueError(f"--trace sizes a fleet, and does not take options of one batch: leave out {_option(name)}.")
    for name in ("trace", "slo"):
        if name not in fleet:
            raise ValueError(f"A fleet needs --{name} too, such as {FleetOptions.EXAMPLES[name]}.")
    plan_fleet(given, FleetOptions(**fleet, lengths=tuple(_given(ctx, ("prompt", "generate")))))


def _predict(
    model: Path,
    mesh: str | None,
    options: dict[str, Any],
    context: int | None,
    bandwidth: str | None,
    flops: float | None,
    dtype: str | None,
    quantize: str | None,
) -> None:
    """Print what a pass takes by batch. options: of memory, those that were given; the others as in `plan`."""
    with long_work(f"reading {model}"):
        from rich.filesize import decimal

        from jaxinfer.cli.display import figure, say, show
        from jaxinfer.generation.api.build import split_options
        from jaxinfer.generation.engine.config import EngineConfig
        from jaxinfer.generation.execution.memory import FRACTION
        from jaxinfer.generation.execution.placement import DeviceBytes, plan_placement
        from jaxinfer.hub import resolve
        from jaxinfer.models.files.loading import open_model
        from jaxinfer.streaming.prediction import plan_pass

        file = parse_mesh(mesh)
        if "weights" not in file.memory:
            options.setdefault("weights", "disk")
        _, memory = split_options(options, file, owner="plan")  # type: ignore[arg-type]  # checked there
        rates = parse_bandwidths(bandwidth)
        opened = open_model(resolve(model), mesh=file, dtype=dtype, quantize=quantize)
        longest = opened.transformer.context
        context = context or longest
        if not 1 < context <= longest:
            raise ValueError(f"--context must be in [2, {longest}] for this model, got {context}.")
        config = EngineConfig(max_batch=1, context=context)
        placement = plan_placement(opened, config, memory)
    with long_work("measuring bandwidth and devices"):
        planned = plan_pass(opened, placement, context=context, bandwidths=rates, flops=flops)
        rates |= planned.bandwidths
    needs = DeviceBytes(opened, config, memory)
    if placement is None:
        used = needs.of_whole(0)
        say("All weights fit on the devices, so nothing is streamed.")
    else:
        there, experts = placement.tiers.count("device") + placement.depth.device + 1, placement.experts
        used = needs.of_streamed(there, 0, None if experts is None else experts.slots)
        say(str(placement))
    most = max(1, int((needs.limit - used) * FRACTION) // needs.cache)
    if placement is not None and (sizes := needs.cache_sizes) is not None and sizes.offloaded:
        most = max(1, sizes.offloaded // sizes.least)
    best = min(planned.balanced, most) if planned.predict(1).bound == "fetch" else None
    show(_passes(planned, best, most))
    links = "".join(f"{decimal(int(rate))}/s from {tier} to all devices, " for tier, rate in planned.bandwidths.items())
    say(f"{links}{figure(planned.runner.device.flops / 1e12, 3)} TFLOP/s of each device.")
    say(f"The cache has room for {most:,} sequences of {context} tokens.")
    notes = [expert_note(planned.runner, best or 1), cache_note(planned.runner, context // 2, rates)]
    if best is not None and memory.kv_offload is None:
        notes.append(offload_note(planned.runner, context, most, planned.balanced))
    for note in filter(None, notes):
        say(note)


def _passes(planned: "PlannedPass", best: int | None, most: int) -> "Table":
    """Make the table of passes over several numbers of sequences, at most `most`, of which `best` is recommended."""
    from jaxinfer.cli.display import figure, table

    passes = table("limited by", "sequences", "s a pass", "tokens/s", figures=3)
    for count in sorted({1, *(size for size in (8, 64, best, most) if size is not None and size <= most)}):
        seconds = planned.predict(count)
        figures = (figure(x, 3) for x in (seconds.total, count / seconds.total))
        passes.add_row(seconds.bound, f"{'(recommended) ' if count == best else ''}{count:,}", *figures)
    return passes


def _given(ctx: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: ctx.params[name] for name in names if ctx.params[name] is not None}


def _option(name: str) -> str:
    return {"model": "MODEL", "named": "--model"}.get(name, "--" + name.replace("_", "-"))


def _draw(ctx: typer.Context, file: Path) -> None:
    """Draw schedules for the pipeline of the mesh, by default for one of four stages."""
    for name in _given(ctx, PREDICTED):
        raise ValueError(f"--gantt draws schedules, the same for every model: leave out {_option(name)}.")
    sizes = _given(ctx, DRAWN)
    for name in ("prompt_tokens", "attention_context"):
        if name in sizes and "chunks" not in sizes:
            raise ValueError(f"{_option(name)} is only used with --chunks; add --chunks, such as --chunks 8.")
    if (mesh := parse_mesh(ctx.params["mesh"]).mesh) is not None:
        sizes["stages"] = mesh.pipeline
        if mesh.pipeline == 1:
            raise ValueError(
                f"--mesh {ctx.params['mesh']} has no pipeline stages for --gantt to draw; add for example pipeline=4."
            )
    if file != TERMINAL:
        check_plot("--gantt", file)
    draw(file, GanttOptions(**sizes))


def parse_bandwidths(text: str | None) -> dict[str, float]:
    """Return the bytes a second of each tier.

    >>> parse_bandwidths("disk=3GB, host=25GB")
    {'disk': 3000000000.0, 'host': 25000000000.0}
    """
    from jaxinfer.streaming.config import parse_bytes

    rates: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        tier, equals, size = part.rpartition("=")
        if (tier := tier.strip()) not in ("disk", "host") and equals:
            raise ValueError(f"--bandwidth: layers cannot be streamed from {tier!r}; known: disk, host.")
        rate = float(parse_bytes("--bandwidth", size))
        rates |= {tier: rate} if tier else {"disk": rate, "host": rate}
    return rates
