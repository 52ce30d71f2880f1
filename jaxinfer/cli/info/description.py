"""The table of a model: its family, its sizes and where it comes from."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import typer
from rich.filesize import decimal
from rich.table import Table

from jaxinfer import hub
from jaxinfer.checkpoints import read_file, read_manifest
from jaxinfer.models import DecoderConfig, VisionConfig, ViTConfig
from jaxinfer.models.config import AttentionConfig, DeltaRuleConfig, Mixer, MlpConfig, TransformerConfig
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.files.conversion import source_of
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.tokenizer_files import TOKENIZER, token_texts
from jaxinfer.models.presets import active_parameter_count, parameter_count
from jaxinfer.models.stages import Stages
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.layer_folders import find_layer_folders


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """The facts about a model that need no weights.

    Attributes:
      description: its description.
      rows: names and values of other facts, such as where it comes from.
      ends: the texts of its end-of-text tokens, by token.
    """

    description: Description
    rows: Mapping[str, str]
    ends: Mapping[int, str]


def look_at(model: str) -> KnownModel:
    """Return what is known of a model. Exits with status 1 if it is not supported, after a line for each reason."""
    seen = hub.look_at(model)
    if isinstance(seen, Path):
        return _converted(seen)
    if seen.description is None:
        typer.echo(f"{model} is not supported:")
        for reason in seen.refused:
            typer.echo(f"- {' '.join(reason.split())}")
        raise typer.Exit(1)
    return KnownModel(
        seen.description,
        {"fetched from": seen.source, "converted": "not yet: on first use, or with `jaxinfer convert`"},
        seen.ends,
    )


def _converted(directory: Path) -> KnownModel:
    manifest, description = read_manifest(directory), Description.read(directory)
    reads_images, tokenizer = isinstance(description.config, VisionConfig), read_file(directory, TOKENIZER)
    rows = {
        "fetched from": source_of(directory),
        "stored bytes": decimal(manifest.bytes),
        "layer files": _layer_files(directory),
        "tokenizer": "" if reads_images else "no: token ids only" if tokenizer is None else "yes",
    }
    return KnownModel(description, rows, {} if tokenizer is None else token_texts(description.eos_ids, tokenizer))


def table_of(name: str, known: KnownModel, mesh: MeshConfig, stages: Stages | None) -> Table:
    """Make a table with a row for each fact about a model on a mesh.

    Args:
      name: the title of the column of values.
      stages: the stages of its pipeline; None: it has none.
    """
    description, config = known.description, known.description.config
    parameters, active = parameter_count(config), active_parameter_count(config)
    table = Table("", name, title_justify="left")
    for row, value in (
        ("supported", "texts alone: images are refused" if _sees(description) else "yes"),
        ("family", f"{description.family} ({description.kind}{'' if description.generates else ' without a head'})"),
        *(_vision_rows(config) if isinstance(config, VisionConfig) else _transformer_rows(config)),
        ("parameters", f"{parameters:,}"),
        ("active parameters", f"{active:,}" if active < parameters else ""),
        ("stored as", description.quantization or description.dtype),
        *known.rows.items(),
        *(_text_rows(description, known.ends) if isinstance(config, DecoderConfig) else ()),
        ("mesh", ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in mesh.AXES)),
        ("stages", "" if stages is None else stages),
    ):
        if value != "":
            table.add_row(row, str(value))
    return table


def _sees(description: Description) -> bool:
    """Tell whether the whole model also sees images, which are not implemented."""
    family = FAMILIES.get(description.family)
    return family is not None and bool(family.left_out) and description.family == family.model_types[0]


def _text_rows(description: Description, ends: Mapping[int, str]) -> list[tuple[str, object]]:
    """Return the tokens that end a text, and the sampling defaults, of a decoder."""
    texts = ", ".join(f"{id_} {ends.get(id_, '')}".rstrip() for id_ in description.eos_ids)
    values = ", ".join(f"{name}={value}" for name, value in description.sampling.named.items())
    return [
        ("ends of text", texts or "none: texts end by their length or stop strings"),
        ("sampling defaults", values or "neutral: the model names none"),
    ]


def _transformer_rows(config: TransformerConfig) -> list[tuple[str, object]]:
    return [*_layer_rows(config), ("vocabulary", config.vocab), ("context", config.context)]


def _layer_rows(config: TransformerConfig | ViTConfig) -> list[tuple[str, object]]:
    heads = Counter(_heads(config.layer(layer).mixer) for layer in range(config.layers))
    return [
        ("layers", config.layers),
        ("width", config.embed),
        ("heads", "; ".join(size if n == config.layers else f"{size}, {n} layers" for size, n in heads.items())),
        *_mlp_rows(config),
    ]


def _heads(mixer: Mixer) -> str:
    if isinstance(mixer, DeltaRuleConfig):
        return f"{mixer.value_heads} of {mixer.value_dim}, {mixer.key_heads} keys of {mixer.key_dim} (delta rule)"
    assert isinstance(mixer, AttentionConfig)
    return f"{mixer.q_heads} of {mixer.head_dim}, {mixer.kv_heads} KV"


def _mlp_rows(config: TransformerConfig | ViTConfig) -> list[tuple[str, object]]:
    if not isinstance(config, DecoderConfig) or not config.moe_layers:
        return [("MLP hidden", _width(config.layer(0).mlp))]
    dense = [config.layer(layer).mlp for layer in range(config.layers) if layer not in config.moe_layers]
    experts = config.layer(config.moe_layers[0]).mlp
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


def _width(mlp: MlpConfig) -> str:
    return f"{mlp.hidden}{' gated' if mlp.gated else ''}"


def _vision_rows(config: VisionConfig) -> list[tuple[str, object]]:
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
    folders = find_layer_folders(directory)
    size = decimal(sum(folder.bytes for folder in folders))
    plural = "s" if len(folders) > 1 else ""
    return f"{len(folders)} folder{plural} of {size}; see jaxinfer cache {directory}" if folders else ""
