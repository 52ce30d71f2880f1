"""`jaxinfer cache`: files that are kept on disk between starts."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

KINDS = {
    "executables": "compiled programs; without them a start compiles",
    "layers": "layers of models that were streamed from disk, as devices take them",
    "leaves": "what weights a model has; without it a start builds the model to know",
    "experts": "files of experts whose model directories may not be written to",
    "costs": "measured times of programs",
    "cpu_kernels": "C++ kernels that were compiled for this CPU, and up to how many rows they are used",
    "choices": "the fastest implementations, as `tune` measured them",
    "models": "models that were fetched by name, or that examples converted",
    "circuit-board": "experts that an example trained",
    "benchmarks": "models and results of benchmarks",
}
"""The folders of the cache."""


def cache(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="A model directory, or one that was given as layer_files: show the files of layers there instead.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete all that is shown, and say how much that was.")
    ] = False,
) -> None:
    """Show what is kept on disk between starts, where, and how large it is.

    It may be deleted at any time. Files of layers that a process streams are left.
    """
    if directory is not None:
        return _layer_files(directory, clear)
    from rich.filesize import decimal

    from jaxinfer.cli.display import show, table
    from jaxinfer.disk_cache import cache_folder

    folder = cache_folder()
    before = {name: _sizes(folder / name) for name in KINDS}
    if clear:
        from jaxinfer.streaming.layer_folders import remove_layer_folders

        remove_layer_folders(folder / "layers")
        for name in KINDS.keys() - {"layers"}:
            shutil.rmtree(folder / name, ignore_errors=True)
    shown = table("", "", "files", "size", figures=2, title=str(folder))
    kept = {name: _sizes(folder / name) for name in KINDS}
    for name, sizes in kept.items():
        shown.add_row(name, KINDS[name], f"{len(sizes):,}", decimal(sum(sizes)))
    show(shown)
    if clear:
        typer.echo(f"Freed {decimal(sum(map(sum, before.values())) - sum(map(sum, kept.values())))}.")


def _layer_files(directory: Path, clear: bool) -> None:
    from rich.filesize import decimal

    from jaxinfer.cli.display import show, table
    from jaxinfer.streaming.layer_folders import find_layer_folders, remove_layer_folders

    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; name a model directory, or one with files of layers.")
    before = find_layer_folders(directory)
    if clear:
        remove_layer_folders(directory)
    shown = table("", "layers of", "size", figures=1, title=str(directory))
    kept = find_layer_folders(directory)
    for folder in kept:
        shown.add_row(folder.path.name, folder.about, decimal(folder.bytes))
    show(shown)
    if clear:
        typer.echo(f"Freed {decimal(sum(f.bytes for f in before) - sum(f.bytes for f in kept))}.")


def _sizes(folder: Path) -> list[int]:
    """Return the size in bytes of every file below a folder, without files that are deleted meanwhile."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except FileNotFoundError:
            pass
    return sizes
