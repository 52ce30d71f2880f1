"""`jaxinfer plan`: how fast a model will run whose layers are streamed, before it is loaded."""

from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.common import (
    DeviceMemoryOption,
    DtypeOption,
    HostMemoryOption,
    MeshOption,
    PrefetchOption,
    QuantizeOption,
    parse_mesh,
)


def plan(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)],
    weights: Annotated[str | None, typer.Option(help="Where layers are: host, disk, or auto (default: disk).")] = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    prefetch: PrefetchOption = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a sequence (default: the model's).")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help='Bytes a second to all devices, "25GB" or "disk=3GB,host=25GB" (default: measured here).'),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="A second, of each device (default: measured here).")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
) -> None:
    """Predict tokens a second by batch from what the tier and the device can do, and recommend a batch.

    A pass takes as long as fetching its layers or computing them, whichever is longer; several devices share the disk
    and the host's memory.
    """
    from rich.filesize import decimal

    from jaxinfer.cli.display import figure, show, table
    from jaxinfer.generation.api.build import split_options
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.memory import FRACTION
    from jaxinfer.generation.execution.placement import DeviceBytes, plan_placement
    from jaxinfer.hub import resolve
    from jaxinfer.models.files.loading import open_model
    from jaxinfer.progress import long_work
    from jaxinfer.streaming.prediction import plan_pass

    file = parse_mesh(mesh)
    given = {"weights": weights, "device_memory": device_memory, "host_memory": host_memory, "prefetch": prefetch}
    options = {name: value for name, value in given.items() if value is not None}
    if "weights" not in file.memory:
        options.setdefault("weights", "disk")
    _, memory = split_options(options, file, owner="plan")  # type: ignore[arg-type]  # checked there
    bandwidths = parse_bandwidths(bandwidth)
    opened = open_model(resolve(directory), mesh=file, dtype=dtype, quantize=quantize)
    longest = opened.transformer.context
    context = context or longest
    if not 1 < context <= longest:
        raise ValueError(f"--context must be in [2, {longest}] for this model, got {context}.")
    config = EngineConfig(max_batch=1, context=context)
    placement = plan_placement(opened, config, memory)
    if placement is None:
        typer.echo("All weights fit on the devices: nothing is streamed.")
        return
    with long_work("measuring what layers come from, and the devices"):
        planned = plan_pass(opened, placement, bandwidths=bandwidths, flops=flops)
    best, needs = planned.balanced_tokens, DeviceBytes(opened, config, memory)
    most = best
    if needs.cache:
        there = placement.tiers.count("device") + placement.depth.device + 1
        most = max(1, int((needs.limit - needs.of_streamed(there, 0)) * FRACTION) // needs.cache)
        best = min(best, most)
    passes = table("limited by", "sequences", "s a pass", "tokens/s", "TFLOP/s", figures=4, title=str(placement))
    for tokens in sorted({1, 8, 64, best, most} - {size for size in (8, 64) if size > most}):
        prediction = planned.predict(tokens)
        limit = "computing" if prediction.compute_seconds > prediction.fetch_seconds else "fetching"
        figures = (figure(x, 3) for x in (prediction.seconds, prediction.tokens_per_s, prediction.flops / 1e12))
        passes.add_row(limit, f"{'(recommended) ' if tokens == best else ''}{tokens:,}", *figures)
    show(passes)
    rates = ", ".join(f"{decimal(int(rate))}/s from {tier}" for tier, rate in planned.bandwidths.items())
    room = f"; the cache has room for {most:,} sequences of {context} tokens" if needs.cache else ""
    typer.echo(f"{rates} to all devices, {figure(planned.flops / 1e12, 3)} TFLOP/s of each{room}.")


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
            raise ValueError(f"--bandwidth: {tier!r} is no tier that layers come from; there are disk, host.")
        rate = float(parse_bytes("--bandwidth", size))
        rates |= {tier: rate} if tier else {"disk": rate, "host": rate}
    return rates
