"""Names that are read from files and must not lead out of their folder; and the GGUF file that a path means."""

import pathlib
import re

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


_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def split_name(file: str) -> tuple[str, int, int] | None:
    """Split the name of a part of a GGUF file as llama.cpp writes it; None for a file that is not split.

    Returns: the name that the whole has, the number of the part, from 1, and the number of parts.

    >>> split_name("tiny-Q8_0-00002-of-00003.gguf")
    ('tiny-Q8_0', 2, 3)
    >>> split_name("tiny-Q8_0.gguf")
    """
    match = _PART.fullmatch(file)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return match["name"], int(match["number"]), int(match["count"])


def gguf_name(file: str) -> str:
    """The name of the model in a GGUF file: that of the file, without what tells its parts apart."""
    split = split_name(file)
    return file.removesuffix(".gguf") if split is None else split[0]


def part_names(file: str) -> list[str]:
    """The names of all parts of the GGUF file that a file is a part of, in order; its own if it is not split."""
    if (split := split_name(file)) is None:
        return [file]
    name, _, count = split
    return [f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def gguf_parts(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a GGUF file: itself, or all parts of one that is split, of which any may be given.

    Raises CheckpointError for parts that are not there.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    if missing := [part.name for part in parts if not part.is_file()]:
        if len(parts) == 1:
            raise CheckpointError(f"{path}: no such file.")
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: missing of its {len(parts)} parts: {', '.join(missing[:3])}{more}; fetch all into one folder."
        )
    return parts


def find_gguf(path: pathlib.Path) -> pathlib.Path | None:
    """Find the GGUF file that a path names: itself, or the one in a directory of nothing else; None for other paths.

    If it is split, it is the first part. Raises CheckpointError for files that are not there, and for a directory with
    several models.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return gguf_parts(path)[0]
    if not path.is_dir() or (path / "config.json").exists() or list(path.glob("*.safetensors")):
        return None
    files = sorted({part_names(file.name)[0] for file in path.glob("*.gguf")})
    if len(files) > 1:
        raise CheckpointError(f"{path}: {len(files)} GGUF files ({files[0]}, ...); name one of them.")
    return gguf_parts(path / files[0])[0] if files else None
