"""`jaxinfer embed`: vectors of texts from the command line."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from jaxinfer.generation.text import Prompt

MOST_COLUMNS = 9
"""Most texts whose similarities are shown as a matrix, which then fits 80 columns."""


def embed(
    ctx: typer.Context,
    model: ModelArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.", show_default=False)] = None,
    prompts_file: PromptsFileOption = None,
    token_ids: Annotated[list[str] | None, typer.Option(help="A text as token ids: 5,17,3.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Write the vectors there, float32, a row a text.")
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print a table of the texts' cosine similarities.")
    ] = False,
    level: Annotated[int, typer.Option(help="-r: each layer of an encoder merges r tokens, which is faster.")] = 0,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    max_batch: Annotated[int, typer.Option(help="Most texts that run together.")] = 32,
    kernels: KernelsOption = True,
    weights: WeightsOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    prefetch: PrefetchOption = None,
    layer_files: LayerFilesOption = None,
) -> None:
    """Print the vectors of texts, of length 1, a line of JSON each; or write them, or show how similar they are."""
    prompts = read_prompts(texts or [], prompts_file, token_ids or [])
    if output is not None and output.suffix != ".npy":
        raise ValueError(f"--output {output}: must end in .npy, the format that is written.")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output}: no such directory: {output.parent}.")
    from jaxinfer.generation import Embedder

    with Embedder(**model_options(ctx), max_batch=max_batch) as embedder:
        vectors = embedder.embed(prompts)
    if output is not None:
        _write(output, vectors)
    if similarity:
        from jaxinfer.cli.display import show

        show(_similarities(prompts, vectors))
    if output is None and not similarity:
        for index, (text, vector) in enumerate(zip(prompts, vectors.tolist(), strict=True)):
            given = {"prompt": text} if isinstance(text, str) else {"token_ids": text}
            print(json.dumps({"index": index, **given, "embedding": vector}))


def _write(file: Path, vectors: "np.ndarray") -> None:
    import numpy as np

    content = io.BytesIO()
    np.save(content, vectors)
    write_atomically(file, content.getvalue())
    note(f"[{vectors.shape[0]} vectors of {vectors.shape[1]} written to {file}]")


def _similarities(texts: "list[Prompt]", vectors: "np.ndarray") -> "Table":
    """Return the cosine of each two texts; of many, for each text the most similar other one."""
    import numpy as np

    from jaxinfer.cli.display import table

    cosines = vectors @ vectors.T
    names = [text if isinstance(text, str) else ",".join(map(str, text)) for text in texts]
    if len(texts) <= MOST_COLUMNS:
        columns = [str(number) for number in range(1, len(texts) + 1)]
        shown = table("", "text", *columns, figures=len(texts))
        for number, (name, row) in enumerate(zip(names, cosines, strict=True), 1):
            shown.add_row(str(number), name, *(f"{cosine:.2f}" for cosine in row))
        return shown
    np.fill_diagonal(cosines, -np.inf)
    shown = table("text", "most similar", "cosine", figures=1)
    for name, row in zip(names, cosines, strict=True):
        shown.add_row(name, names[row.argmax()], f"{row.max():.2f}")
    return shown
