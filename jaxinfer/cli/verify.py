"""`jaxinfer verify`: checksums of a model directory, and agreement with its source."""

from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.common import ModelArgument
from jaxinfer.progress import long_work

# Stored dtype -> the largest difference of a float32 logit that its rounding causes in models of usual depth.
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1.0, "fp8": 1.0, "int4": 3.0}


def verify(
    model: ModelArgument,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Compare with this source directory, GGUF file or repository, or with a safetensors file of tokens, "
            "lengths and logits (or images and logits)."
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest absolute difference allowed in a logit (default: by stored dtype)."),
    ] = None,
) -> None:
    """Check a model's files, and compare its outputs.

    It checks every file's sha256, and compares tensors or logits with a reference. It exits with status 1 if they
    differ.
    """
    if reference is None and atol is not None:
        raise ValueError("--atol has no effect without --reference: leave it out, or name what to compare with.")
    with long_work(f"reading {model}"):
        from jaxinfer.checkpoints import verify_files
        from jaxinfer.checkpoints.paths import find_gguf
        from jaxinfer.hub import fetch, resolve
        from jaxinfer.models.files.description import Description
        from jaxinfer.models.files.verification import compare_outputs, compare_tensors

        directory = resolve(model)
    manifest = verify_files(directory)
    typer.echo(f"sha256 of {len(manifest.files)} files: matches manifest.json")
    if reference is None:
        return
    reference, _ = fetch(reference)
    if reference.is_dir() or find_gguf(reference):
        if atol is not None:
            raise ValueError("--atol has no effect on tensors, which are compared by their rounding: leave it out.")
        tensors = compare_tensors(directory, reference)
        typer.echo(f"{tensors.tensors} tensors, max abs diff {tensors.max_abs_diff:.3g}")
        if tensors.beyond:
            typer.echo(f"these tensors differ by more than rounding: {', '.join(tensors.beyond)}", err=True)
            raise typer.Exit(1)
        return
    description = Description.read(directory)
    allowed = _TOLERANCE[description.quantization or description.dtype] if atol is None else atol
    outputs = compare_outputs(directory, reference)
    typer.echo(f"max abs diff {outputs.max_abs_diff:.3g} (allowed {allowed:.3g})")
    if outputs.kl is not None and outputs.top1 is not None:
        typer.echo(f"KL {outputs.kl:.3g} nats/token, top-1 agreement {outputs.top1:.2%}")
    if not outputs.max_abs_diff <= allowed:
        typer.echo("the outputs differ by more than allowed", err=True)
        raise typer.Exit(1)
