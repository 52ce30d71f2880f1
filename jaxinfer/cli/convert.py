"""`jaxinfer convert`: from a Hugging Face directory to a model directory."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    hf_dir: Annotated[
        Path,
        typer.Argument(help="Directory with config.json and safetensors files, or state dict of ResNet or YOLOv5."),
    ],
    out_dir: Annotated[Path, typer.Argument(help="Model directory to write; must not exist or be empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="Of the matrices: float32, bfloat16 or float16 (default: unchanged).")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Of the matrices: int8 or fp8 (a scale per output), int4 (a scale per 128 inputs)."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="orbax; or streaming, which writes layers as weights='disk' reads them, too.")
    ] = "orbax",
) -> None:
    """Convert a Hugging Face checkpoint, or the state dict of an image model, tensor by tensor.

    OUT_DIR appears only when everything is written; if the command was interrupted, run it again.
    """
    if layout not in ("orbax", "streaming"):
        raise ValueError(f"--layout must be orbax or streaming, got {layout!r}.")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from jaxinfer.models.conversion import HuggingFaceModel
    from jaxinfer.models.conversion import convert as convert_model
    from jaxinfer.models.description import require_transformer

    if layout == "streaming":
        require_transformer(hf_dir, HuggingFaceModel(hf_dir).config)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)
        description = convert_model(
            hf_dir,
            out_dir,
            dtype=dtype,
            quantize=quantize,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if layout == "streaming":
            from jaxinfer.models.loading import open_model
            from jaxinfer.streaming.files import write_layer_files

            task = bar.add_task("writing layers", total=None)
            write_layer_files(
                open_model(out_dir), progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
    stored = description.quantization or description.dtype
    typer.echo(f"{out_dir}: {description.family} {description.kind}, {stored}")
