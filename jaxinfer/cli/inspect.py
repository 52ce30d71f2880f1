"""`jaxinfer inspect`: the kernels of a model's decode program on a GPU that is not here."""

import collections
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, ModelArgument, QuantizeOption, parse_mesh
from jaxinfer.cli.display import show, table
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from rich.table import Table

    from jaxinfer.compiled import ProgramSpec
    from jaxinfer.compiled.target import Kernel, TargetReport
    from jaxinfer.generation.engine.buckets import Buckets
    from jaxinfer.generation.execution.programs.decode import Decode
    from jaxinfer.generation.execution.programs.passes import Pass
    from jaxinfer.models import DecoderConfig, WeightFormat
    from jaxinfer.pallas_kernels.weights import QuantizedFormat
    from jaxinfer.sharding import ShardingRules

PAGE_SIZE = 16
TEMPORARIES = 5


def inspect(
    model: ModelArgument,
    target: Annotated[str, typer.Option(help="GPU to compile for.")] = "h200",
    batch: Annotated[int, typer.Option(min=1, help="Number of requests in the batch.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    passes: Annotated[int, typer.Option(min=1, help="Maximum decode passes, and so tokens, per launch.")] = 16,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    registers: Annotated[
        bool, typer.Option("--registers", help="Also show registers, spills and SASS; takes some seconds more.")
    ] = False,
) -> None:
    """Show a model's GPU program, without a GPU.

    It compiles the decode loop, and shows its kernels, collectives, CUDA graphs and memory.

    It reads config.json only and times nothing. On a real GPU, XLA tunes the tiles of its matrix products, so these can
    differ.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so no GPU is looked for
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns about what it cannot tune without the GPU
    with long_work(f"reading {model}"):
        from jaxinfer.compiled.target import Target, compile_program
        from jaxinfer.hub import resolve
        from jaxinfer.models import DecoderConfig
        from jaxinfer.models.files.description import Description, require_transformer, weight_format
        from jaxinfer.models.stages import stages_on
        from jaxinfer.sharding import ShardingRules

        gpu, description = Target.load(target), Description.read(resolve(model))
    file = parse_mesh(mesh)
    weights, config = (
        weight_format(description, dtype=dtype, quantize=quantize),
        require_transformer(model, description.config),
    )
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{model} is an encoder; inspect compiles the decode loop of decoders.")
    if (context := context or config.context) > config.context:
        raise ValueError(f"--context {context} is more than the model's {config.context}; lower it.")
    if file.mesh is not None:  # before the compiler for GPUs is looked for
        stages_on(config, file.mesh.abstract(), file.rules or ShardingRules())
    built = None if file.mesh is None else gpu.mesh(file.mesh)
    spec, sizes = decode_program(
        config,
        weights,
        batch=batch,
        context=context,
        passes=passes,
        mesh=built,
        rules=file.rules,
        stored=description.quantization,
    )
    report = compile_program(gpu, spec, sizes, mesh=built, resources=registers)
    title = f"{model}: decode of {passes} passes, batch {batch}, {context} tokens"
    if spec.static.stages is not None:
        title += f"; {spec.static.stages}, {_micro_batches(sizes)}"
    show(*report_tables(report, title, registers, turn="pass" if spec.static.stages is None else "tick"))


def _micro_batches(sizes: "Pass | Decode") -> str:
    count = dict(sizes.bucket)["micro_batches"]
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def decode_program(
    config: "DecoderConfig",
    weights: "WeightFormat",
    *,
    batch: int,
    context: int,
    passes: int,
    mesh: "Mesh | None" = None,
    rules: "ShardingRules | None" = None,
    stored: "QuantizedFormat | None" = None,
) -> "tuple[ProgramSpec[Any, Buckets], Pass | Decode]":
    """Return the engine's decode loop for a model on a GPU, without speculation, and the sizes to compile it for.

    On a mesh with stages it is the ring, with a micro-batch for each stage if there are several requests.
    mesh, rules: as in `DeviceLayout`. stored: as in `fit`. Raises ValueError for a mesh that does not fit the model.
    """
    from jaxinfer.generation.engine.config import EngineConfig
    from jaxinfer.generation.execution.layout import DeviceLayout
    from jaxinfer.generation.execution.programs import decode, ring
    from jaxinfer.models import DecoderConfig
    from jaxinfer.models.fitting import fit
    from jaxinfer.sharding import ShardingRules

    engine = EngineConfig(max_batch=batch, context=context, page_size=PAGE_SIZE, max_decode_passes=passes)
    pages = -(-context // PAGE_SIZE)
    rules = rules or ShardingRules()
    fitted = fit(config, weights, mesh, rules, stored=stored).config
    assert isinstance(fitted, DecoderConfig)
    layout = DeviceLayout(fitted, weights, engine, num_pages=batch * pages, platform="gpu", mesh=mesh, rules=rules)
    if layout.stages is not None:
        micro_batches = layout.num_stages if batch > 1 else 1
        return ring.spec(layout), ring.decode_sizes(micro_batches, batch, speculative=0, pages=pages)
    return decode.spec(layout), decode.Decode(batch=batch, speculative=0, pages=pages)


def report_tables(report: "TargetReport", title: str, registers: bool, turn: str = "pass") -> "list[Table]":
    """Lay out kernels, memory and exchanges for the terminal.

    Args:
      registers: whether it has each kernel's resources.
      turn: the word for a turn of its loop: a pass, or a tick of a pipeline.
    """
    last = report.layers - 1
    each_turn = [kernel for kernel in report.outside_layers() if kernel.in_loop and not _is_asked(kernel.condition)]
    return [
        _summary(report, title, turn),
        _kernels(f"layer {last}", report.of_layer(last), registers),
        _kernels("outside the layers", each_turn, registers),
        _branches(report),
        *([_collectives(report, turn)] if report.collectives else []),
        _temporaries(report),
    ]


def _summary(report: "TargetReport", title: str, turn: str) -> "Table":
    from rich.filesize import decimal

    per_layer = {len(report.of_layer(layer)) for layer in range(1, report.layers)} or {len(report.of_layer(0))}
    conditional = sum(_is_asked(kernel.condition) for kernel in report.kernels)
    outside = [kernel.in_loop for kernel in report.outside_layers() if not _is_asked(kernel.condition)]
    summary = table("", title)
    for name, value in (
        ("target", f"{report.target}, compiled in {report.compile_seconds:.1f} s"),
        ("CUDA graphs", f"{report.graphs}, and {len(report.host_launches) or 'no'} launches outside"),
        ("kernels", f"{len(report.kernels)}, of which greedy rows run all but {conditional}"),
        ("kernels per layer", " or ".join(map(str, sorted(per_layer)))),
        ("outside the layers", f"{outside.count(True)} in a greedy {turn}, {outside.count(False)} more in a step"),
        ("written in place", f"{report.aliased} of {report.donated} donated arrays, {decimal(report.alias_bytes)}"),
        ("arguments", decimal(report.argument_bytes)),
        ("workspace", decimal(report.temp_bytes)),
        ("memory per device", decimal(report.argument_bytes + report.temp_bytes)),
    ):
        summary.add_row(name, value)
    return summary


def _kernels(title: str, kernels: "Iterable[Kernel]", registers: bool) -> "Table":
    texts = (title, "from", *(["SASS"] if registers else []))
    sizes = ("blocks", "threads", "shared\nbytes", *(["registers", "spilled\nbytes"] if registers else []))
    rows = table(*texts, *sizes, figures=len(sizes))
    for kernel in kernels:
        launch = (kernel.grid, kernel.threads, kernel.shared_bytes)
        cells = [f"{size:,}" for size in launch] if kernel.grid else [""] * 3  # they are not known for copies
        used, features = kernel.resources, []
        if registers:
            cells += [f"{used.registers}", f"{used.spill_bytes:,}"] if used else ["", ""]
            features = [" ".join(used.features) if used else ""]
        rows.add_row(kernel.name, _place(kernel.scope), *features, *cells)
    return rows


def _branches(report: "TargetReport") -> "Table":
    branches = table("run only if a row asks for it", "kernels", figures=1)
    counts = collections.Counter(_place(kernel.condition) for kernel in report.kernels if _is_asked(kernel.condition))
    for place, count in counts.items():
        branches.add_row(place, str(count))
    return branches


def _collectives(report: "TargetReport", turn: str) -> "Table":
    """Return a table of what a turn exchanges; a line sums up arrays of one kind, shape and place in all layers."""
    exchanges = table(f"exchanged\nin a {turn}", "from", "array", "devices", "how\nmany", "bytes sent", figures=3)
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    sent: collections.Counter[tuple[str, ...]] = collections.Counter()
    in_loop = any(collective.in_loop for collective in report.collectives)
    for collective in report.collectives:
        place = _place(collective.op_name.split("/", 1)[-1])
        if any(map(_is_asked, collective.conditions)):
            place += ", if asked"
        elif in_loop and not collective.in_loop:
            place += ", once a step"
        array = f"{collective.dtype}[{','.join(map(str, collective.shape))}]"
        key = collective.kind, place, array, str(collective.participants)
        counts[key] += collective.trips
        sent[key] += round(collective.trips * collective.wire_bytes)
    for key, count in counts.items():
        exchanges.add_row(*key, str(count), f"{sent[key]:,}")
    return exchanges


def _temporaries(report: "TargetReport") -> "Table":
    largest = table("largest temporaries", "from", "bytes", "how many", figures=2)
    same = collections.Counter((buffer.shape, buffer.bytes) for buffer in report.temporaries)
    scopes = {kernel.instruction: kernel.scope for kernel in report.kernels}
    for (shape, size), count in list(same.items())[:TEMPORARIES]:
        first = next(buffer.name for buffer in report.temporaries if buffer.shape == shape)
        largest.add_row(shape, _place(scopes.get(first.split("{")[0], "")), f"{size:,}", str(count))
    return largest


def _is_asked(condition: str) -> bool:
    """Return whether a row must ask for what a condition holds back, which else runs on some stages of a pipeline."""
    return bool(condition) and not re.search(r"/(first_stage|last_stage|some_stages)/cond$", condition)


_CONTROL = re.compile(r"while|shard_map|body|cond|branch_\d+_fun|jit\(.*\)|layers\.\d+")


def _place(scope: str) -> str:
    """Return a place in the model without loops, branches and the layer's number."""
    return "/".join(part for part in scope.split("/") if not _CONTROL.fullmatch(part))
