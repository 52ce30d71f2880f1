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
        str | None, typer.Option(help="Of the tier, a second, such as 25GB (default: measured here).")
    ] = None,
    flops: Annotated[float | None, typer.Option(help="Operations a second (default: measured here).")] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
) -> None:
    """Predict tokens a second by batch from what the tier and the device can do, and recommend a batch.

    A pass takes as long as fetching its layers or computing them, whichever is longer.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from jaxinfer.generation.api.build import split_options
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.placement import DeviceBytes, plan_placement
    from jaxinfer.models.devices import available_bytes, devices_of
    from jaxinfer.models.loading import open_model
    from jaxinfer.streaming import prediction
    from jaxinfer.streaming.config import parse_bytes

    file = parse_mesh(mesh)
    given = {"weights": weights, "device_memory": device_memory, "host_memory": host_memory, "prefetch": prefetch}
    options = {name: value for name, value in given.items() if value is not None}
    if "weights" not in file.memory:
        options.setdefault("weights", "disk")
    _, memory = split_options(options, file, owner="plan")  # type: ignore[arg-type]  # checked there
    opened = open_model(directory, mesh=file, dtype=dtype, quantize=quantize)
    longest = opened.transformer.context
    context = context or longest
    if not 1 < context <= longest:
        raise ValueError(f"--context must be in [2, {longest}] for this model, got {context}.")
    config = EngineConfig(max_batch=1, context=context)
    placement = plan_placement(opened, config, memory)
    if placement is None:
        typer.echo("All weights fit on the devices: nothing is streamed.")
        return
    device, tiers = devices_of(opened.mesh)[0], set(placement.tiers)
    if bandwidth is not None:
        rate = float(parse_bytes("--bandwidth", bandwidth))
    elif "disk" in tiers:
        rate = prediction.measure_disk(opened.folder)
    else:
        rate = prediction.measure_host_copy(device)
    known = {
        "streamed_bytes": len(placement.streamed) * placement.layer_bytes,
        "parameters": opened.parameters // len(devices_of(opened.mesh)),
        "bandwidth": rate,
        "flops": flops or prediction.measure_flops(device, opened.weights.dtype),
    }
    free = min(available_bytes(opened.mesh), memory.device_memory or available_bytes(opened.mesh))
    needs = DeviceBytes.of(opened, config)
    most = max(1, (free - needs.rest - placement.buffer_bytes) // max(1, needs.cache))
    best = min(prediction.balanced_tokens(**known), most)
    table = Table(
        "sequences", "s a pass", "tokens/s", "TFLOP/s", "limited by", title=str(placement), title_justify="left"
    )
    for tokens in sorted({1, 8, 64, best, most} - {size for size in (8, 64) if size > most}):
        found = prediction.predict(tokens, **known)
        limit = "computing" if found.compute_seconds > found.fetch_seconds else "fetching"
        figures = f"{found.seconds:.3g}", f"{found.tokens_per_s:.3g}", f"{found.flops / 1e12:.3g}", limit
        table.add_row(f"{tokens}{' (recommended)' if tokens == best else ''}", *figures)
    Console().print(table)
    typer.echo(
        f"{decimal(int(rate))}/s, {known['flops'] / 1e12:.3g} TFLOP/s; the cache has room for {most} sequences of "
        f"{context} tokens."
    )
