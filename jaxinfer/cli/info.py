"""`jaxinfer info`: the contents of a model directory, and the memory it needs."""

import math
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.common import DtypeOption, MeshOption, QuantizeOption, parse_mesh


def info(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.")],
    mesh: MeshOption = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per request (default: the model's).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
) -> None:
    """Show family, sizes, dtype and bytes, and the memory per device for a mesh, a context and a batch."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from checkpoints import read_manifest
    from jaxinfer.models import WeightFormat
    from jaxinfer.models.description import Description, weight_format
    from jaxinfer.models.devices import bytes_per_device
    from jaxinfer.models.leaves import cache_leaves, canonical_leaves
    from sharding import MeshConfig, ShardingRules

    manifest, description = read_manifest(directory), Description.read(directory)
    config, weights = description.config, weight_format(description, dtype=dtype, quantize=quantize)
    layout, rules = parse_mesh(mesh) or MeshConfig(), ShardingRules()
    context = context or config.context
    if context > config.context:
        raise ValueError(f"--context {context} is more than the model's {config.context}; lower it.")

    leaves = canonical_leaves(config, weights)
    parameters = sum(math.prod(leaf.shape) for leaf in canonical_leaves(config, WeightFormat()).values())
    weight_bytes = bytes_per_device(leaves, layout.abstract(), rules)
    cache_bytes = bytes_per_device(cache_leaves(config, weights, batch, context), layout.abstract(), rules)

    attention = config.attention
    table = Table("", str(directory), title_justify="left")
    for name, value in (
        ("family", f"{description.family} ({description.kind})"),
        ("layers", config.layers),
        ("width", config.embed),
        ("heads", f"{attention.q_heads} of {attention.head_dim}, {attention.kv_heads} KV"),
        ("MLP hidden", f"{config.mlp.hidden}{' gated' if config.mlp.gated else ''}"),
        ("vocabulary", config.vocab),
        ("context", config.context),
        ("parameters", f"{parameters:,}"),
        ("stored as", description.quantization or description.dtype),
        ("stored bytes", decimal(manifest.bytes)),
        ("tokenizer", "yes" if (directory / "tokenizer.json").is_file() else "no: token ids only"),
        ("mesh", f"data={layout.data}, tensor={layout.tensor}"),
        ("weights per device", decimal(weight_bytes)),
        ("KV cache per device", f"{decimal(cache_bytes)} for batch {batch} of {context} tokens" if cache_bytes else ""),
        ("memory per device", decimal(weight_bytes + cache_bytes)),
    ):
        if value != "":
            table.add_row(name, str(value))
    Console().print(table)
