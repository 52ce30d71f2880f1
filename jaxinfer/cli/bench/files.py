"""The files that commands write: checked before the run, written atomically after it."""

import os
from pathlib import Path

import typer

from jaxinfer.disk_cache import write_atomically
from jaxinfer.extras import require_extra

PLOT_SUFFIXES = (".png", ".svg")


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Raise ValueError or MissingExtraError if a file could not be written after the run."""
    if json_file is not None:
        check_file("--json", json_file)
    if plot is not None:
        check_plot("--plot", plot)


def check_plot(option: str, plot: Path) -> None:
    """Raise ValueError or MissingExtraError if an option's file could not be drawn and written."""
    check_file(option, plot)
    if plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"{option} {plot} must end in {' or '.join(PLOT_SUFFIXES)}.")
    require_extra("matplotlib", f"{option} {plot}")


def check_file(option: str, file: Path) -> None:
    """Raise ValueError if an option's file could not be written."""
    if file.is_dir():
        raise ValueError(f"{option} {file} is a directory; name a file.")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"{option} {file}: {file.parent} is not a directory that can be written to.")


def write_file(file: Path, content: bytes) -> None:
    """Write all of `content` or nothing, and say so on stderr."""
    write_atomically(file, content)
    typer.echo(f"Wrote {file}", err=True)
