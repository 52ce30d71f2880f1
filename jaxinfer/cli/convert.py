"""`jaxinfer convert`: from a Hugging Face directory, a GGUF file, or a repository of the hub, to a model directory."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from jaxinfer.cli.common import LayerFilesOption, MeshOption, parse_mesh
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxinfer.models.files.description import Description
    from jaxinfer.sharding import MeshConfig, ShardingRules


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Directory with config.json and safetensors files, GGUF file, Hugging Face hub repository "
            "(ORG/NAME, ORG/NAME@REVISION, or ORG/NAME:Q4_K_M for a GGUF file), or state dict in safetensors: ResNet "
            "of torchvision, ViT or DeiT of timm, YOLOv5.",
            show_default=False,
        ),
    ],
    out_dir: Annotated[
        Path | None,
        typer.Argument(
            help="Model directory to write; must be empty or not exist (default: the cache folder, where other "
            "commands find the model by the same MODEL).",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the matrices: float32, bfloat16 or float16 (default: as stored; bfloat16 for quantised GGUF)"
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantise the matrices to int8 or fp8 (one scale per output), or int4 (one scale per 128 inputs)."
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Format to write: orbax; single-file, for small models; or streaming, which also writes the layer "
            "files that --weights disk reads."
        ),
    ] = "orbax",
    mesh: MeshOption = None,
    layer_files: LayerFilesOption = None,
) -> None:
    """Convert a checkpoint to a model directory.

    A state dict NAME.safetensors takes the names of its classes, one a line, from NAME.labels.txt next to it, or from
    labels.txt. preprocessor_config.json in the same folder says how it resizes images.

    From a repository it downloads safetensors, configs and the tokenizer, except files that were downloaded before.
    OUT_DIR appears only when complete; if the command was interrupted, run it again.

    With --layout streaming, runs with the same --mesh, --dtype and --quantize read the layers written here. The default
    --dtype for these layers is that of a run on this machine: float32 on a CPU, otherwise as stored.
    """
    if layout not in ("orbax", "single-file", "streaming"):
        raise ValueError(f"--layout must be orbax, single-file or streaming, got {layout!r}.")
    for option, value in (("--mesh", mesh), ("--layer-files", layer_files)):
        if value is not None and layout != "streaming":
            raise ValueError(f"{option} needs --layout streaming: add it, or leave out {option}.")
    if out_dir is None and (dtype or quantize or layout != "orbax"):
        raise ValueError("--dtype, --quantize and --layout need an OUT_DIR: the cache keeps models as they are stored.")
    with long_work(f"reading {source}"):
        from jaxinfer.hub import fetch, resolve
        from jaxinfer.models.files.conversion import convert as convert_model
        from jaxinfer.models.files.conversion import open_writer
        from jaxinfer.models.files.description import Description

    if out_dir is None:
        folder = resolve(source)
        return _print(folder, Description.read(folder))
    kept = "single-file" if layout == "single-file" else "orbax"
    open_writer(out_dir, dtype=dtype, quantize=quantize, layout=kept)  # refuses what cannot be written before fetching
    hf_dir, fetched = fetch(source, None if dtype or quantize else out_dir)
    run = _Run.from_options(hf_dir, mesh, layer_files, quantize) if layout == "streaming" else None
    description = convert_model(hf_dir, out_dir, dtype=dtype, quantize=quantize, layout=kept, source=fetched)
    _print(out_dir, description)
    if run:
        typer.echo(run.write_layers(out_dir, dtype))


def _print(folder: Path, description: "Description") -> None:
    """Print what is in a model directory, and where it comes from."""
    from jaxinfer.models.files.conversion import source_of

    stored = description.quantization or description.dtype
    source = f", from {origin}" if (origin := source_of(folder)) else ""
    typer.echo(f"{folder}: {description.family} {description.kind}, {stored}{source}")


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run that layers are written for.

    Attributes:
      mesh: the devices; None: one.
      rules: which dimension is split over which axis of the mesh.
      layer_files: the folder of the layers; None: the model directory.
    """

    mesh: "Mesh | None"
    rules: "ShardingRules"
    layer_files: Path | None

    @classmethod
    def from_options(cls, hf_dir: Path, mesh: str | None, layer_files: str | None, quantize: str | None) -> Self:
        """Read the command's options. Raises ValueError, before converting, for a model that cannot run this way."""
        from jaxinfer.generation.api.build import ModelOptions, split_options
        from jaxinfer.models import WeightFormat
        from jaxinfer.models.files.conversion import HuggingFaceModel
        from jaxinfer.models.files.description import parse_quantization, require_transformer
        from jaxinfer.models.fitting import fit
        from jaxinfer.sharding import ShardingRules
        from jaxinfer.streaming.layer_folders import experts_of

        file, stored = parse_mesh(mesh), parse_quantization(quantize)
        options: ModelOptions = {"weights": "disk"}
        if layer_files:
            options["layer_files"] = layer_files
        _, memory = split_options(options, file, owner="convert")
        config = require_transformer(hf_dir, HuggingFaceModel(hf_dir).config)
        rules, built = file.rules or ShardingRules(), _mesh(file.mesh)
        if (lanes := rules.lanes(built)) > 1:
            raise ValueError(
                f"--mesh data={lanes}: streaming layers with data parallelism is not implemented; set data = 1."
            )
        if built is not None and built.size > 1 and experts_of(config):
            raise ValueError(
                f"--mesh {mesh}: streaming experts to several devices is not implemented; leave out --mesh."
            )
        fit(config, WeightFormat(quantized=stored), built, rules, stored=stored)
        return cls(built, rules, memory.layer_files)

    def write_layers(self, model: Path, dtype: str | None) -> str:
        """Write the layers of a model directory; returns a line about them."""
        from jaxinfer.models.devices import default_dtype
        from jaxinfer.models.files.description import Description
        from jaxinfer.models.files.loading import open_model
        from jaxinfer.streaming.layer_folders import describe_format, write_layer_files

        dtype = dtype or default_dtype(None) or Description.read(model).dtype
        opened = open_model(model, mesh=self.mesh, rules=self.rules, dtype=dtype)
        folder = write_layer_files(opened, self.layer_files or model)
        return f"{folder}: layer files, for runs in {describe_format(opened)}"


def _mesh(config: "MeshConfig | None") -> "Mesh | None":
    """Return the mesh to divide layers over: CPU devices if the machine has too few others."""
    import jax

    if config is None:
        return None
    with contextlib.suppress(RuntimeError):  # JAX has started, and keeps the number of devices that it has
        jax.config.update("jax_num_cpu_devices", max(config.size, jax.config.jax_num_cpu_devices))
    devices = jax.devices() if jax.device_count() >= config.size else jax.devices("cpu")
    return config.build(devices[: config.size])
