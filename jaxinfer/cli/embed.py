"""`jaxinfer embed`: vectors of texts or images from the command line."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.bench.files import check_file
from jaxinfer.cli.common import (
    ContextOption,
    DeviceMemoryOption,
    DtypeOption,
    HostMemoryOption,
    KernelsOption,
    LayerFilesOption,
    MeshOption,
    ModelArgument,
    PrefetchOption,
    PromptsFileOption,
    QuantizeOption,
    WeightsOption,
    model_options,
    note,
    read_prompts,
)
from jaxinfer.disk_cache import write_atomically
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from jaxinfer.text import Prompt

MOST_COLUMNS = 9
"""Most texts whose similarities are shown as a matrix, which then fits 80 columns."""


def embed(
    ctx: typer.Context,
    model: ModelArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.", show_default=False)] = None,
    prompts_file: PromptsFileOption = None,
    token_ids: Annotated[list[str] | None, typer.Option(help="Text as token ids, such as 5,17,3.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Image file, for vision transformers; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Write the vectors to this file (float32, a row per input).")
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print a table of cosine similarities between the inputs.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompt to put before each text: the name of one of the model's, such as query, or a text.",
            show_default="the model's default prompt",
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate/--no-truncate", help="Cut texts that are too long, or refuse them.")
    ] = True,
    level: Annotated[
        int, typer.Option(help="-r merges r tokens in each layer of an encoder: faster, less accurate; 0 merges none.")
    ] = 0,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of inputs in a batch.")] = 32,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
) -> None:
    """Compute vectors of texts or images.

    It prints them as one line of JSON each. --output writes them to a file instead, and --similarity prints how similar
    they are.
    """
    if image and (texts or prompts_file or token_ids):
        raise ValueError("--image: a model takes either images or texts; leave out the texts.")
    prompts = [] if image else read_prompts(texts or [], prompts_file, token_ids or [])
    if output is not None and output.suffix != ".npy":
        raise ValueError(f"--output {output}: must end in .npy, the format that is written.")
    if output is not None:
        check_file("--output", output)
    with long_work(f"loading {model}"):
        _check_inputs(model, image or [])
        from jaxinfer.generation import Embedder

    with Embedder(model, **model_options(ctx), max_batch=max_batch) as embedder:
        vectors = embedder.embed(image or prompts, prompt=prompt, truncate=truncate)
    names = [str(file) for file in image] if image else [_name(text) for text in prompts]
    if output is not None:
        _write(output, vectors)
    if similarity:
        from jaxinfer.cli.display import show

        show(_similarities("image" if image else "text", names, vectors))
    if output is None and not similarity:
        inputs = [{"image": name} for name in names] if image else [_given(text) for text in prompts]
        for index, (given, vector) in enumerate(zip(inputs, vectors.tolist(), strict=True)):
            print(json.dumps({"index": index, **given, "embedding": vector}))


def _check_inputs(model: Path, images: list[Path]) -> None:
    """Raise ValueError for inputs of the other kind than the model's, and for images that cannot be opened."""
    from jaxinfer.hub import resolve
    from jaxinfer.models.files.description import Description

    reads_images = Description.read(resolve(model)).kind == "vision_transformer"
    if images and not reads_images:
        raise ValueError(f"--image: {model} is a model of texts; give it texts.")
    if reads_images and not images:
        raise ValueError(f"{model} is a model of images; name files with --image.")
    if images:
        from jaxinfer.models.vision.image_files import check_image_file

        for file in images:
            check_image_file(file)


def _name(text: "Prompt") -> str:
    return text if isinstance(text, str) else ",".join(map(str, text))


def _given(text: "Prompt") -> dict[str, object]:
    return {"prompt": text} if isinstance(text, str) else {"token_ids": text}


def _write(file: Path, vectors: "np.ndarray") -> None:
    import numpy as np

    content = io.BytesIO()
    np.save(content, vectors)
    write_atomically(file, content.getvalue())
    note(f"[{vectors.shape[0]} vectors of {vectors.shape[1]} written to {file}]")


def _similarities(kind: str, names: list[str], vectors: "np.ndarray") -> "Table":
    """Return the cosine of each two inputs; of many, for each input the most similar other one."""
    import numpy as np

    from jaxinfer.cli.display import table

    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    if len(names) <= MOST_COLUMNS:
        columns = [str(number) for number in range(1, len(names) + 1)]
        shown = table("", kind, *columns, figures=len(names))
        for number, (name, row) in enumerate(zip(names, cosines, strict=True), 1):
            shown.add_row(str(number), name, *(f"{cosine:.2f}" for cosine in row))
        return shown
    np.fill_diagonal(cosines, -np.inf)
    shown = table(kind, "most similar", "cosine", figures=1)
    for name, row in zip(names, cosines, strict=True):
        shown.add_row(name, names[row.argmax()], f"{row.max():.2f}")
    return shown
