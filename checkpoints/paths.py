"""Names of files that are read from files: they come from whoever made the folder, and must not lead out of it."""

import pathlib

from jaxinfer.checkpoints.errors import CheckpointError


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file of a folder that has this name, such as "state/_METADATA".

    Links are followed, since caches of downloads are made of them; who can make them can write anything there.
    Raises CheckpointError for a name that leads out of the folder.

    >>> inside(pathlib.Path("model"), "state/_METADATA").as_posix()
    'model/state/_METADATA'
    """
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise CheckpointError(f"{folder}: names a file {name!r}, which is not in it; fetch or convert the model again.")
    return folder / path
