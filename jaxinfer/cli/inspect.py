"""`jaxinfer inspect`: what a model's decode program would run on a GPU that is not here."""

import collections
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.common import DtypeOption, QuantizeOption

if TYPE_CHECKING:
    from jaxinfer.compiled import ProgramSpec, Sizes
    from jaxinfer.compiled.target import TargetReport
    from jaxinfer.generation.engine.buckets import Buckets
    from jaxinfer.models import DecoderConfig, WeightFormat

PAGE_SIZE = 16
TEMPORARIES = 5


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.", show_default=False)],
    target: Annotated[str, typer.Option(help="The GPU to compile for.")] = "h200",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    passes: Annotated[int, typer.Option(min=1, help="Most passes through the model, and so tokens, per launch.")] = 16,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    registers: Annotated[
        bool, typer.Option("--registers", help="Also registers, spills and SASS, for some seconds.")
    ] = False,
) -> None:
    """Compile a model's decode loop for a GPU on this machine and show kernels, CUDA graphs and memory.

    Only config.json is read. Nothing is timed, and XLA's matrix products have tiles that a real GPU would tune.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so no GPU is looked for
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns about what it cannot tune without the GPU
    from jaxinfer.compiled.target import Target, compile_for
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.description import Description, weight_format

    gpu, description = Target.load(target), Description.read(directory)
    weights, config = weight_format(description, dtype=dtype, quantize=quantize), description.config
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{directory} holds an encoder; inspect compiles the decode loop of decoders.")
    if (context := context or config.context) > config.context:
        raise ValueError(f"--context {context} is more than the model's {config.context}; lower it.")
    spec, sizes = decode_program(config, weights, batch=batch, context=context, passes=passes)
    report = compile_for(
        gpu,
        spec.function(sizes),
        spec.arguments(sizes),
        donate=spec.donate,
        options=spec.compiler_options(sizes),
        resources=registers,
    )
    _print(report, f"{directory}: decode of {passes} passes, batch {batch}, {context} tokens", registers)


def decode_program(
    config: "DecoderConfig", weights: "WeightFormat", *, batch: int, context: int, passes: int
) -> "tuple[ProgramSpec[Buckets], Sizes]":
    """The engine's decode loop for a model on a GPU, without speculation, and the sizes to compile it for."""
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.layout import DeviceLayout
    from jaxinfer.generation.execution.programs import decode

    engine = EngineConfig(max_batch=batch, context=context, page_size=PAGE_SIZE, max_decode_passes=passes)
    pages = -(-context // PAGE_SIZE)
    layout = DeviceLayout(config, weights, engine, num_pages=batch * pages, platform="gpu")
    return decode.spec(layout), {"batch": batch, "speculative": 0, "pages": pages}


def _print(report: "TargetReport", title: str, registers: bool) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    per_layer = [len(report.of_layer(layer)) for layer in range(report.layers)]
    summary = Table("", title)
    for name, value in (
        ("target", f"{report.target}, compiled in {report.compile_seconds:.1f} s"),
        ("CUDA graphs", f"{report.graphs}, and {len(report.host_launches) or 'no'} launches outside"),
        ("kernels", f"{len(report.kernels)}, {len(report.of_layer(None))} of them outside the layers"),
        ("kernels per layer", f"{max(per_layer[1:] or per_layer)}; {per_layer[0]} in layer 0, with what all share"),
        ("written in place", f"{report.aliased} of {report.donated} donated arrays, {decimal(report.alias_bytes)}"),
        ("arguments", decimal(report.argument_bytes)),
        ("workspace", decimal(report.temp_bytes)),
        ("memory per device", decimal(report.argument_bytes + report.temp_bytes)),
    ):
        summary.add_row(name, value)

    last = report.layers - 1
    kernels = Table(f"layer {last}", "from", "blocks", "threads", "shared bytes")
    if registers:
        kernels.add_column("registers")
        kernels.add_column("spilled bytes")
        kernels.add_column("SASS")
    for kernel in report.of_layer(last):
        cells = [kernel.name, kernel.scope.split(f"layers.{last}/")[-1]]
        cells += [f"{size:,}" for size in (kernel.grid, kernel.threads, kernel.shared_bytes)]
        if registers:
            used = kernel.resources
            cells += [str(used.registers), str(used.spill_bytes), " ".join(used.features)] if used else [""] * 3
        kernels.add_row(*cells)

    temporaries = Table("largest temporaries", "from", "bytes", "how many")
    same = collections.Counter((buffer.shape, buffer.bytes) for buffer in report.temporaries)
    scopes = {kernel.instruction: kernel.scope for kernel in report.kernels}
    for (shape, size), count in list(same.items())[:TEMPORARIES]:
        first = next(buffer.name for buffer in report.temporaries if buffer.shape == shape)
        temporaries.add_row(shape, scopes.get(first.split("{")[0], ""), f"{size:,}", str(count))
    console = Console()
    for table in (summary, kernels, temporaries):
        for column in table.columns[2:]:
            column.justify = "right"
        console.print(table)
