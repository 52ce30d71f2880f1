"""`jaxinfer info`: whether a model is supported, what it is and needs, and the measured costs of its programs."""

import dataclasses
import os
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, ModelArgument, QuantizeOption, parse_mesh
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxinfer.models.config import MlpConfig, TransformerConfig, VisionConfig, ViTConfig
    from jaxinfer.models.files.description import Description


def info(
    model: ModelArgument,
    mesh: MeshOption = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of requests in a batch.")] = 8,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    target: Annotated[
        str | None, typer.Option(help="List the kernels for this GPU, such as h200, which need not be present.")
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Also show measured times of the model's programs on this machine.")
    ] = False,
) -> None:
    """Show whether a model runs here, and what it needs.

    That is its sizes, its memory, and the kernels it would use. The command reads config.json and small files next to
    it: no weights are downloaded, and nothing is converted. Memory per device is for the chosen mesh, context and
    batch; the default dtype is this machine's. For a model that is not supported, it lists all reasons and exits with
    status 1.
    """
    if target is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so no GPU is looked for
    with long_work(f"reading {model}"):
        from rich.console import Console
        from rich.table import Table

        from jaxinfer.cli.info.costs import print_costs
        from jaxinfer.cli.info.formats import print_formats
        from jaxinfer.cli.info.kernels import print_kernels
        from jaxinfer.compiled.target import Target
        from jaxinfer.generation.execution.memory import device_tenants
        from jaxinfer.models import DecoderConfig, VisionConfig
        from jaxinfer.models.devices import bytes_per_device, default_dtype
        from jaxinfer.models.files.description import weight_format
        from jaxinfer.models.fitting import fit
        from jaxinfer.models.leaves import cache_leaves, canonical_leaves
        from jaxinfer.models.presets import active_parameter_count, parameter_count
        from jaxinfer.models.stages import stages_on
        from jaxinfer.pallas_kernels.target import gpu_or_none
        from jaxinfer.serving.budget import Budget, Reservation
        from jaxinfer.sharding import MeshConfig, ShardingRules

        gpu = Target.load(target).gpu if target is not None else gpu_or_none()
    shown, file = _look_at(str(model)), parse_mesh(mesh)
    if target is not None and file.mesh is not None:
        raise ValueError("--target with --mesh is not implemented: kernels are listed for one device; leave one out.")
    description, config = shown.description, shown.description.config
    dtype = dtype or (default_dtype(None) if target is None else None)
    weights = weight_format(description, dtype=dtype, quantize=quantize)
    layout, rules = file.mesh or MeshConfig(), file.rules or ShardingRules()
    reads_images = isinstance(config, VisionConfig)
    longest = 0 if reads_images else config.context
    context = context or longest
    if context > longest:
        raise ValueError(f"--context {context} is more than the model's {longest}; lower it.")

    fitted = fit(config, weights, layout.abstract(), rules, stored=description.quantization).config
    stages = stages_on(fitted, layout.abstract(), rules)
    leaves = canonical_leaves(fitted, weights)
    if stages is not None:
        fitted, leaves = stages.config, {name: there.leaf for name, there in stages.leaves(weights).items()}
    parameters, active = parameter_count(config), active_parameter_count(config)
    weight_bytes = bytes_per_device(leaves, layout.abstract(), rules)
    cached = cache_leaves(fitted, weights, layout.data * max_batch, context)  # a batch of each lane
    cache_bytes = bytes_per_device(cached, layout.abstract(), rules)

    table = Table("", str(model), title_justify="left")
    for name, value in (
        ("supported", "yes"),
        ("family", f"{description.family} ({description.kind}{'' if description.generates else ' without a head'})"),
        *(_vision_rows(config) if reads_images else _transformer_rows(config)),
        ("parameters", f"{parameters:,}"),
        ("active parameters", f"{active:,}" if active < parameters else ""),
        ("stored as", description.quantization or description.dtype),
        *shown.rows.items(),
        *(_text_rows(description, shown.ends) if isinstance(config, DecoderConfig) else ()),
        ("mesh", ", ".join(f"{axis}={getattr(layout, axis)}" for axis in layout.AXES)),
        ("stages", "" if stages is None else stages),
    ):
        if value != "":
            table.add_row(name, str(value))
    served = f", batch {max_batch} of {context} tokens" if cache_bytes else ""
    console, budget = Console(), Budget(f"each device, {weights.quantized or weights.dtype}{served}", None)
    would_have = Reservation(Path(model).resolve().name)
    tenants = device_tenants(weights=weight_bytes, cache=cache_bytes)
    would_have.resize({(budget, tenant): size for tenant, size in tenants.items()})
    console.print(table)
    console.print(budget.table())
    print_formats(description, dtype)
    if not reads_images and file.mesh is None:
        print_kernels(config, weights, gpu, batch=max_batch, context=context)
    if costs:
        print_costs(config)


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A model to show: its description, rows of what else is known of it, and the texts of its end-of-text tokens."""

    description: "Description"
    rows: dict[str, str]
    ends: "Mapping[int, str]"


def _look_at(model: str) -> _Shown:
    """Return what is known of a model. Exits with status 1 if it is not supported, after a line for each reason."""
    from jaxinfer.hub import look_at

    seen = look_at(model)
    if isinstance(seen, Path):
        return _converted(seen)
    if seen.description is None:
        typer.echo(f"{model} is not supported:")
        for reason in seen.refused:
            typer.echo(f"- {' '.join(reason.split())}")
        raise typer.Exit(1)
    return _Shown(
        seen.description,
        {"fetched from": seen.source, "converted": "not yet: on first use, or with `jaxinfer convert`"},
        seen.ends,
    )


def _converted(directory: Path) -> _Shown:
    from rich.filesize import decimal

    from jaxinfer.checkpoints import read_file, read_manifest
    from jaxinfer.models import VisionConfig
    from jaxinfer.models.files.conversion import source_of
    from jaxinfer.models.files.description import Description
    from jaxinfer.models.files.tokenizer_files import TOKENIZER, token_texts

    manifest, description = read_manifest(directory), Description.read(directory)
    reads_images, tokenizer = isinstance(description.config, VisionConfig), read_file(directory, TOKENIZER)
    rows = {
        "fetched from": source_of(directory),
        "stored bytes": decimal(manifest.bytes),
        "layer files": _layer_files(directory),
        "tokenizer": "" if reads_images else "no: token ids only" if tokenizer is None else "yes",
    }
    return _Shown(description, rows, {} if tokenizer is None else token_texts(description.eos_ids, tokenizer))


def _text_rows(description: "Description", ends: "Mapping[int, str]") -> list[tuple[str, object]]:
    """Return the tokens that end a text, and the sampling defaults, of a decoder."""
    texts = ", ".join(f"{id_} {ends.get(id_, '')}".rstrip() for id_ in description.eos_ids)
    values = ", ".join(f"{name}={value}" for name, value in description.sampling.named.items())
    return [
        ("ends of text", texts or "none: texts end by their length or stop strings"),
        ("sampling defaults", values or "neutral: the model names none"),
    ]


def _transformer_rows(config: "TransformerConfig") -> list[tuple[str, object]]:
    return [*_layer_rows(config), ("vocabulary", config.vocab), ("context", config.context)]


def _layer_rows(config: "TransformerConfig | ViTConfig") -> list[tuple[str, object]]:
    attention = config.attention
    return [
        ("layers", config.layers),
        ("width", config.embed),
        ("heads", f"{attention.q_heads} of {attention.head_dim}, {attention.kv_heads} KV"),
        *_mlp_rows(config),
    ]


def _mlp_rows(config: "TransformerConfig | ViTConfig") -> list[tuple[str, object]]:
    from jaxinfer.models import DecoderConfig

    if not isinstance(config, DecoderConfig) or not config.moe_layers:
        return [("MLP hidden", _width(config.mlp))]
    dense = [config.mlp_in(layer) for layer in range(config.layers) if layer not in config.moe_layers]
    experts = config.mlp_in(config.moe_layers[0])
    assert experts.moe is not None
    router, shared = experts.moe.router, experts.shared
    capacity = f", at most {router.capacity_factor:g} times their even share" if router.capacity_factor else ""
    return [
        ("MLP hidden", _width(dense[0]) if dense else ""),
        ("experts", f"{router.experts} of {_width(experts)}"),
        ("experts per token", f"{router.experts_per_token}{capacity}"),
        ("shared expert", f"{_width(shared)}, {experts.moe.shared_mix}" if shared else ""),
        ("layers with experts", len(config.moe_layers)),
    ]


def _width(mlp: "MlpConfig") -> str:
    return f"{mlp.hidden}{' gated' if mlp.gated else ''}"


def _vision_rows(config: "VisionConfig") -> list[tuple[str, object]]:
    from jaxinfer.models import ViTConfig

    if isinstance(config, ViTConfig):
        patches = [("patches", f"{config.patches} of {config.patch_size} x {config.patch_size}")]
        shape = _layer_rows(config) + patches
    else:
        shape = [("widths", ", ".join(map(str, config.widths))), ("depths", ", ".join(map(str, config.depths)))]
    labels = f"{len(config.labels)}: {shorten(', '.join(config.labels), 60, placeholder=' ...')}"
    return [
        *shape,
        ("images", f"{config.image_size} x {config.image_size}"),
        ("labels", labels if config.labels else "none: it returns only vectors"),
    ]


def _layer_files(directory: Path) -> str:
    from rich.filesize import decimal

    from jaxinfer.streaming.layer_folders import find_layer_folders

    folders = find_layer_folders(directory)
    size = decimal(sum(folder.bytes for folder in folders))
    plural = "s" if len(folders) > 1 else ""
    return f"{len(folders)} folder{plural} of {size}; see jaxinfer cache {directory}" if folders else ""
