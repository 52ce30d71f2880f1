"""`jaxinfer cache`: files that are kept on disk between starts."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

KINDS = {
    "executables": "compiled programs; without them, programs are compiled at the start",
    "layers": "layer files of models that are streamed from disk",
    "leaves": "names and shapes of models' weights; without them, a start takes longer",
    "experts": "files of experts whose model directories are not writable",
    "costs": "measured times of programs",
    "cpu_kernels": "C++ kernels compiled for this CPU, and the row counts up to which they are used",
    "choices": "the fastest implementations, as measured by `tune`",
    "models": "models downloaded by name, or converted by examples",
    "circuit-board": "experts trained by an example",
    "benchmarks": "models and results of benchmarks",
}
"""The folders of the cache."""


def cache(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Show the layer files of this model directory, or of this --layer-files folder, instead.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete everything that is shown, and print the space freed.")
    ] = False,
    clear_old: Annotated[
        bool,
        typer.Option("--clear-old", help="Delete only models that an earlier version converted, which nothing uses."),
    ] = False,
) -> None:
    """Show or delete the files kept between starts.

    It prints their location and size. They can be deleted at any time. --clear keeps layer files that a process is
    using.
    """
    if directory is not None:
        if clear_old:
            raise ValueError("--clear-old is for the cache's models, and DIR has layer files: leave one of them out.")
        return _layer_files(directory, clear)
    from rich.filesize import decimal

    from jaxinfer.cli.display import show, table
    from jaxinfer.disk_cache import cache_folder
    from jaxinfer.hub.conversions import old_conversions

    folder = cache_folder()
    before = {name: _sizes(folder / name) for name in KINDS}
    if clear_old:
        for old in old_conversions():
            shutil.rmtree(old, ignore_errors=True)
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
    if unused := old_conversions():
        typer.echo("Models that an earlier version converted, and nothing uses; --clear-old deletes them:")
        shown = table("", "size", figures=1)
        for old in unused:
            shown.add_row(old.name, decimal(sum(_sizes(old))))
        show(shown)
    if clear or clear_old:
        typer.echo(f"Freed {decimal(sum(map(sum, before.values())) - sum(map(sum, kept.values())))}.")


def _layer_files(directory: Path, clear: bool) -> None:
    from rich.filesize import decimal

    from jaxinfer.cli.display import show, table
    from jaxinfer.streaming.layer_folders import find_layer_folders, remove_layer_folders

    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; name a model directory, or a folder with layer files.")
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
