"""`jaxinfer info`: the contents of a model directory, the memory it needs, and the measured costs of its programs."""

import math
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, QuantizeOption, parse_mesh

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.compiled.costs import KeptCosts
    from jaxinfer.models.config import ModelConfig, TransformerConfig, VisionConfig, ViTConfig

FEWEST_POINTS = 3
"""Fewest points of a line that is worth showing: it goes through any two."""

_OFF = ("=None", "=0")
"""Ends of options that are not in use."""


def info(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.")],
    mesh: MeshOption = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Also what programs took on this machine, in all formats.")
    ] = False,
) -> None:
    """Show family, sizes, dtype and bytes, and what is reserved of each device for a mesh, a context and a batch.

    With the dtype that models have on this machine, if none is given.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from jaxinfer.checkpoints import read_manifest
    from jaxinfer.generation.execution.memory import device_tenants
    from jaxinfer.hub import resolve
    from jaxinfer.models import VisionConfig, WeightFormat
    from jaxinfer.models.devices import bytes_per_device, default_dtype
    from jaxinfer.models.files.conversion import source_of
    from jaxinfer.models.files.description import Description, weight_format
    from jaxinfer.models.fitting import fit
    from jaxinfer.models.leaves import cache_leaves, canonical_leaves
    from jaxinfer.serving.budget import Budget, Reservation
    from jaxinfer.sharding import MeshConfig, ShardingRules

    directory = resolve(directory)
    manifest, description = read_manifest(directory), Description.read(directory)
    config, file = description.config, parse_mesh(mesh)
    weights = weight_format(description, dtype=dtype or default_dtype(None), quantize=quantize)
    layout, rules = file.mesh or MeshConfig(), file.rules or ShardingRules()
    reads_images = isinstance(config, VisionConfig)
    longest = 0 if reads_images else config.context
    context = context or longest
    if context > longest:
        raise ValueError(f"--context {context} is more than the model's {longest}; lower it.")

    fitted = fit(config, weights, layout.abstract(), rules, stored=description.quantization).config
    leaves = canonical_leaves(fitted, weights)
    parameters = sum(math.prod(leaf.shape) for leaf in canonical_leaves(config, WeightFormat()).values())
    weight_bytes = bytes_per_device(leaves, layout.abstract(), rules)
    cache_bytes = bytes_per_device(cache_leaves(fitted, weights, max_batch, context), layout.abstract(), rules)

    table = Table("", str(directory), title_justify="left")
    for name, value in (
        ("fetched from", source_of(directory)),
        ("family", f"{description.family} ({description.kind})"),
        *(_vision_rows(config) if reads_images else _transformer_rows(config)),
        ("parameters", f"{parameters:,}"),
        ("stored as", description.quantization or description.dtype),
        ("stored bytes", decimal(manifest.bytes)),
        ("layer files", _layer_files(directory)),
        ("tokenizer", _tokenizer(directory) if not reads_images else ""),
        ("mesh", f"data={layout.data}, tensor={layout.tensor}"),
    ):
        if value != "":
            table.add_row(name, str(value))
    served = f", batch {max_batch} of {context} tokens" if cache_bytes else ""
    console, budget = Console(), Budget(f"each device, {weights.quantized or weights.dtype}{served}", None)
    would_have = Reservation(directory.resolve().name)
    tenants = device_tenants(weights=weight_bytes, cache=cache_bytes)
    would_have.resize({(budget, tenant): size for tenant, size in tenants.items()})
    console.print(table)
    console.print(budget.table())
    if costs:
        _print_costs(config)


def _transformer_rows(config: "TransformerConfig") -> list[tuple[str, object]]:
    return [*_layer_rows(config), ("vocabulary", config.vocab), ("context", config.context)]


def _layer_rows(config: "TransformerConfig | ViTConfig") -> list[tuple[str, object]]:
    attention = config.attention
    return [
        ("layers", config.layers),
        ("width", config.embed),
        ("heads", f"{attention.q_heads} of {attention.head_dim}, {attention.kv_heads} KV"),
        ("MLP hidden", f"{config.mlp.hidden}{' gated' if config.mlp.gated else ''}"),
    ]


def _vision_rows(config: "VisionConfig") -> list[tuple[str, object]]:
    from jaxinfer.models import ViTConfig

    if isinstance(config, ViTConfig):
        patches = [("patches", f"{config.patches} of {config.patch_size} x {config.patch_size}")]
        shape = _layer_rows(config) + patches
    else:
        shape = [("widths", ", ".join(map(str, config.widths))), ("depths", ", ".join(map(str, config.depths)))]
    return [
        *shape,
        ("images", f"{config.image_size} x {config.image_size}"),
        ("labels", f"{len(config.labels)}: {shorten(', '.join(config.labels), 60, placeholder=' ...')}"),
    ]


def _tokenizer(directory: Path) -> str:
    from jaxinfer.checkpoints import read_file

    return "no: token ids only" if read_file(directory, "tokenizer.json") is None else "yes"


def _layer_files(directory: Path) -> str:
    from rich.filesize import decimal

    from jaxinfer.streaming.layer_folders import find_layer_folders

    folders = find_layer_folders(directory)
    size = decimal(sum(folder.bytes for folder in folders))
    plural = "s" if len(folders) > 1 else ""
    return f"{len(folders)} folder{plural} of {size}; see jaxinfer cache {directory}" if folders else ""


def _print_costs(config: "ModelConfig") -> None:
    """Print what a model's programs took on this machine, a table for each format and choice of options."""
    import jax

    from jaxinfer.cli.display import show
    from jaxinfer.compiled.costs import kept_costs
    from jaxinfer.models.devices import device_name

    device = device_name(jax.local_devices()[0])
    records = [kept for kept in kept_costs(device) if kept.model.get("config") == str(config)]
    if not records:
        typer.echo(f"No programs of this model were measured on {device} yet.")
    for kept in records:
        options = [option for option in kept.model.get("options", "").split(", ") if not option.endswith(_OFF)]
        others = [text for name, text in kept.model.items() if text and name not in ("config", "options")]
        title = f"{device}, JAX {kept.jax}\n{', '.join(others + options)}"
        show(*(table for table in (_cost_table(kept, title), _fit_table(kept)) if table.row_count))


def _cost_table(kept: "KeptCosts", title: str) -> "Table":
    from jaxinfer.cli.display import figure, table
    from jaxinfer.compiled.program import bucket_text

    costs = table("program", "sizes", "calls", "mean ms", "p50 ms", "p95 ms", figures=4, title=title)
    for (name, bucket), cost in sorted(kept.costs.items()):
        times = (figure(1e3 * seconds) for seconds in (cost.mean, cost.p50, cost.p95))
        costs.add_row(name, bucket_text(bucket), f"{cost.calls:,}", *times)
    return costs


def _fit_table(kept: "KeptCosts") -> "Table":
    """Return a table of lines through costs that differ in one size alone."""
    from jaxinfer.cli.display import figure, table
    from jaxinfer.compiled import CostTable
    from jaxinfer.compiled.program import bucket_text

    lines = table("program", "line over", "at", "ms for\none more", "ms for\nnone", "R²", "points", figures=4)
    costs = CostTable(kept.costs)
    held = {
        (name, over, tuple(size for size in bucket if size[0] != over)): None
        for name, bucket in sorted(kept.costs)
        for over, _ in bucket
    }
    for name, over, rest in held:
        fit = costs.fit(name, over, **dict(rest))
        if fit and fit.points >= FEWEST_POINTS:
            numbers = figure(1e3 * fit.slope), figure(1e3 * fit.intercept), f"{fit.r2:.3f}", str(fit.points)
            lines.add_row(name, over, bucket_text(rest), *numbers)
    return lines
