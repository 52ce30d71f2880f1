"""Models that were converted once, in `models/` of the cache folder: a folder each, with a name that says which."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.checkpoints import CheckpointError, is_complete
from jaxinfer.checkpoints.paths import find_gguf, gguf_name, gguf_parts
from jaxinfer.disk_cache import cache_folder, require_trusted, write_atomically
from jaxinfer.hub.names import HubName
from jaxinfer.progress import long_work

if TYPE_CHECKING:
    from jaxinfer.hub.repository import Commit
    from jaxinfer.models.files.preview import Preview

CONVERSION = 3
"""Part of a folder's name, raised when a conversion reads more. 3: how texts are embedded and sampled."""

# What fetches and converts is imported when it is needed: a model directory, and a converted model, do without it.


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the model directory that a model is in.

    Args:
      model: a model directory; a Hugging Face directory or a GGUF file, which is converted into the cache folder unless
        it was; or a repository of the hub, ORG/NAME, ORG/NAME@REVISION or ORG/NAME:TAG, which is fetched, and converted
        likewise. A folder of that name goes before the repository.

    Raises CheckpointError for what is none of these or cannot be had, in one line that says what to do.
    """
    path = Path(model)
    if path.is_dir() and is_complete(path):
        return path
    if gguf := find_gguf(path):
        return _converted(gguf, gguf_name(gguf.name), gguf_parts(gguf))
    if path.is_dir():
        return _local(path)
    if path.exists():
        raise CheckpointError(
            f"{path}: a file, not a model directory; convert a state dict in safetensors with "
            "`jaxinfer convert FILE MODEL_DIR`."
        )
    if (name := HubName.parse(model)) is None:
        raise CheckpointError(
            f"{path}: no such directory; name a model directory, a Hugging Face directory, a GGUF file, or a hub "
            "repository such as Qwen/Qwen3-0.6B."
        )
    return _of_hub(name)


def fetch(model: str | os.PathLike[str], out: Path | None = None) -> tuple[Path, Mapping[str, str] | None]:
    """Fetch the Hugging Face directory, or the file, to convert; and where it comes from, if fetched.

    Args:
      model: the directory or the file itself, or a repository of the hub, as in `resolve`.
      out: where the model is to be written as it is stored, which needs room too.
    """
    name = HubName.parse(model)
    if name is None or Path(model).exists() or find_gguf(Path(model)):
        return Path(model), None
    from jaxinfer.hub.repository import find

    commit = find(name)
    return commit.fetch(out), commit.source


def look_at(model: str | os.PathLike[str]) -> "Path | Preview":
    """Return the model directory that a model is in, if it was converted; else what its `config.json` says of it.

    Nothing is converted, and no weights are fetched. model: as in `resolve`, and errors too.
    """
    path = Path(model)
    if not (path.is_dir() and is_complete(path)) and (find_gguf(path) or _is_source(path)):
        from jaxinfer.models.files.preview import preview

        return preview(path)
    if path.exists() or (name := HubName.parse(model)) is None:
        return resolve(path)
    if name.pinned and is_complete(folder := _folder(name.model, name.revision)):
        return folder
    commit = _find(name)
    folder = _folder(name.model, commit.hash)
    return folder if is_complete(folder) else commit.preview()


def old_conversions() -> list[Path]:
    """The folders of models that an earlier version of jaxinfer converted, which are not used any more."""
    folders = cache_folder().glob("models/*@*.*")
    return sorted(folder for folder in folders if folder.is_dir() and _version(folder) < CONVERSION)


def _version(folder: Path) -> float:
    """The `CONVERSION` in a folder's name; infinite if it is none of ours."""
    number = folder.name.rpartition(".")[2]
    return int(number) if number.isdecimal() else math.inf


def _is_source(path: Path) -> bool:
    """Return whether a folder has what a model is converted from."""
    from jaxinfer.checkpoints.huggingface import read_json

    fields = read_json(path / "config.json")
    return bool(fields and "kind" not in fields) or any(path.glob("*.safetensors"))


def _local(path: Path) -> Path:
    """A folder itself, unless it is a Hugging Face directory: then the model that is converted from it."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json", ".jinja", ".txt"))
    if not ((path / "config.json").is_file() and any(file.suffix == ".safetensors" for file in files)):
        return path  # whoever opens it says what is missing
    for inside in ("*/config.json", "*/model.safetensors", "*/*.jinja"):  # sentence-transformers' modules, templates
        files += sorted(path.glob(inside))
    return _converted(path, path.resolve().name, files)


def _converted(path: Path, name: str, files: Sequence[Path]) -> Path:
    """The model that is converted from a path, again when its files have changed."""
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(path.resolve()), state)).encode()).hexdigest()
    from jaxinfer.models.files.conversion import convert

    folder = _folder(name, digest)
    _make(folder, lambda: convert(path, folder))
    return folder


def _of_hub(name: HubName) -> Path:
    if name.pinned and is_complete(folder := _folder(name.model, name.revision)):
        return folder
    from jaxinfer.models.files.conversion import convert

    commit = _find(name)
    folder = _folder(name.model, commit.hash)
    _make(folder, lambda: convert(commit.fetch(folder), folder, source=commit.source))
    if commit.sizes is not None and not name.pinned:
        write_atomically(_noted(name), commit.hash.encode())
    return folder


def _find(name: HubName) -> "Commit":
    """Find the commit that a name means; if the hub does not answer, the one that it meant when it last did."""
    from jaxinfer.hub.repository import find

    noted = _noted(name)
    return find(name, known=noted.read_text() if noted.is_file() else None)


def _noted(name: HubName) -> Path:
    return _models() / f".{name.repository}@{name.revision}".replace("/", "--")


def _models() -> Path:
    folder = cache_folder() / "models"
    try:
        require_trusted(folder)
    except OSError as error:
        raise CheckpointError(f"{error}; or set JAXINFER_CACHE to a folder of your own.") from error
    return folder


def _folder(name: str, version: str) -> Path:
    """The folder of a model by its name, such as ORG/NAME:TAG, and its version, such as a commit."""
    return _models() / f"{re.sub('[/:]', '--', name)}@{version[:12]}.{CONVERSION}"


def _make(folder: Path, make: Callable[[], object]) -> None:
    """Make a folder, unless it is there, in one process at a time."""
    if is_complete(folder):
        return
    import filelock

    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent}: the cache cannot be written ({error.strerror}); set JAXINFER_CACHE to a writable "
            "folder, or convert to a folder of your choice: `jaxinfer convert MODEL MODEL_DIR`."
        ) from error
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    with long_work(f"waiting for another process, which makes {folder.name}"):
        held = lock.acquire()
    with held:
        if not is_complete(folder):
            make()
