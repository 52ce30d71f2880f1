"""Names that are read from files and must not lead out of their folder; and the GGUF file that a path means."""

import pathlib

from jaxinfer.checkpoints.errors import CheckpointError


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of a folder that has this name, such as "state/_METADATA".

    Links are followed, since caches of downloads are made of them; who can make them can write anything there.
    Raises CheckpointError for a name that leads out of the folder.

    >>> inside(pathlib.Path("model"), "state/_METADATA").as_posix()
    'model/state/_METADATA'
    """
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise CheckpointError(f"{folder}: names a file {name!r} outside of it; fetch or convert the model again.")
    return folder / path


def find_gguf(path: pathlib.Path) -> pathlib.Path | None:
    """Find the GGUF file that a path names: itself, or the one in a directory of nothing else; None for other paths.

    Raises CheckpointError for a file that is not there, and for a directory with several.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file.")
        return path
    if not path.is_dir() or (path / "config.json").exists() or list(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path}: {len(files)} GGUF files ({files[0].name}, ...); name one of them.")
    return files[0] if files else None
