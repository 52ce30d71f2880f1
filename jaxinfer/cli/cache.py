"""`jaxinfer cache`: files that are kept on disk between starts."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

KINDS = {
    "executables": "compiled programs; without them a start compiles",
    "leaves": "what weights a model has; without it a start builds the model to know",
    "experts": "files of experts whose model directories may not be written to",
    "costs": "measured times of programs",
    "choices": "the fastest implementations, as `tune` measured them",
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
    clear: Annotated[bool, typer.Option("--clear", help="Delete all that is shown.")] = False,
) -> None:
    """Show what is kept on disk between starts, where, and how large it is.

    It may be deleted at any time, files of layers while no process reads them.
    """
    if directory is not None:
        return _layer_files(directory, clear)
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from jaxinfer.disk_cache import cache_folder

    folder = cache_folder()
    table = Table("", "files", "size", "", title=str(folder), title_justify="left")
    for name, meaning in KINDS.items():
        if clear:
            shutil.rmtree(folder / name, ignore_errors=True)
        sizes = _sizes(folder / name)
        table.add_row(name, str(len(sizes)), decimal(sum(sizes)), meaning)
    Console().print(table)


def _layer_files(directory: Path, clear: bool) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from jaxinfer.streaming.layer_folders import find_layer_folders, remove_layer_folders

    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; name a model directory, or one with files of layers.")
    if clear:
        remove_layer_folders(directory)
    table = Table("", "size", "layers of", title=str(directory), title_justify="left")
    for folder in find_layer_folders(directory):
        table.add_row(folder.path.name, decimal(folder.bytes), folder.about)
    Console().print(table)


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
