"""All that is asked of the hub: which commit a name means, which files it has, and those that a model needs.

`huggingface_hub` is imported when it is first needed: `import jaxinfer` and a converted model do without it.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.gguf_file import has_header
from jaxinfer.checkpoints.huggingface import INDEX, SINGLE, SafetensorsFolder, read_index
from jaxinfer.futures import DaemonThreads
from jaxinfer.hub.errors import HubError, UnreachableError
from jaxinfer.hub.gguf import choose
from jaxinfer.hub.names import HubName
from jaxinfer.models.files.conversion import beside_weights, check_description, dense_weights, source_text
from jaxinfer.models.files.description import CONFIG
from jaxinfer.models.files.gguf_config import ROPE_FACTORS
from jaxinfer.models.files.preview import Preview, described_by, preview
from jaxinfer.progress import LongWork, long_work

HEADER_BYTES = 4 << 20
"""Bytes of a GGUF file after which its header is looked for, then twice as many. A large vocabulary takes 16 MB."""
ANSWER_SECONDS = 10.0
"""How long the hub may take to say what a repository has. A network that drops all packets never says anything."""

_log = logging.getLogger("jaxinfer.hub")

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit of a repository.

    Attributes:
      name: the repository, and the revision that was asked for.
      hash: the 40 digits of the commit.
      sizes: the bytes of its files by name; None: the hub was not asked, only its cache on this machine.
      error: why the hub was not asked.
    """

    name: HubName
    hash: str
    sizes: Mapping[str, int] | None
    error: UnreachableError | None = None

    def __str__(self) -> str:
        return str(dataclasses.replace(self.name, revision=self.hash[:12]))

    @property
    def source(self) -> dict[str, str]:
        """The origin of a model directory, as its `source.json` has it."""
        tag = {"tag": self.name.tag} if self.name.tag else {}
        return {"repository": self.name.repository, "commit": self.hash, **tag}

    def fetch(self, out: Path | None = None) -> Path:
        """Fetch a Hugging Face directory with what a model needs: safetensors, configs and tokenizer; or a GGUF file.

        Files that were fetched before are in the hub's cache, and are taken from there.

        Args:
          out: where the model is to be written as it is stored, which needs room too.

        Raises HubError for a repository that holds no model of ours, before its weights are fetched.
        """
        folder = self._folder
        if (parts := self._gguf()) is not None:
            return self._fetch_gguf(parts, out)
        if self.sizes is None:
            self._require_cached(folder)
            return folder
        self._require_weights(self.sizes)
        with long_work(f"fetching {self.name}", in_bytes=True) as work:
            if CONFIG in self.sizes:
                _download(self.name, CONFIG, self.name.revision)  # the hub's cache notes the commit of the revision
                self._get([CONFIG], work)
                self._check(folder)
            self._get([*beside_weights(self.sizes), *({INDEX} & self.sizes.keys())], work)
            self._check(folder)
            self._get_weights([*self._weights(folder, self.sizes), *self._dense(folder)], out, work)
        return folder

    def _gguf(self) -> list[str] | None:
        """The parts of the GGUF file that is meant; None where safetensors are.

        Raises HubError for a name that means none or several, and the hub's error for a file that is not in its cache.
        """
        if (files := self.sizes) is None:
            files = [file.relative_to(self._folder).as_posix() for file in self._folder.rglob("*")]
        if not self.name.tag and (_has_safetensors(files) or not any(name.endswith(".gguf") for name in files)):
            return None
        try:
            return choose(self.name, files)
        except HubError as error:
            raise (self.error or error) from error

    def _fetch_gguf(self, parts: Sequence[str], out: Path | None) -> Path:
        if self.sizes is not None:
            with long_work(f"fetching {self.name}", in_bytes=True) as work:
                self._get_weights(parts, out, work)
        return self._folder / parts[0]

    def _get_weights(self, names: Sequence[str], out: Path | None, work: LongWork) -> None:
        """Fetch the files of weights, if there is room. out: as in `fetch`."""
        assert self.sizes is not None
        size = sum(self.sizes[name] for name in names)
        missing = sum(self.sizes[name] for name in names if not (self._folder / name).exists())
        _check_room(f"{self}", {self._folder: missing} if out is None else {self._folder: missing, out: size})
        work.update(done=0, total=size)
        self._get(names, work)

    @property
    def _folder(self) -> Path:
        """The folder of the commit in the hub's cache."""
        return _cache_of(self.name.repository) / "snapshots" / self.hash

    def preview(self) -> Preview:
        """Return what the repository holds, by `config.json` and the small files that say more of the model.

        Fetches these, or the header of a GGUF file, if they are not here. Raises HubError for a repository without.
        """
        folder = self._folder
        if (parts := self._gguf()) is not None:
            return self._preview_gguf(parts)
        if self.sizes is None:
            if self.error and not (folder / CONFIG).is_file():
                raise self.error
            return self._preview(folder)
        refused = []
        try:
            self._require_weights(self.sizes)
        except HubError as error:
            refused.append(str(error))
        if CONFIG not in self.sizes:
            raise HubError("; ".join(refused) or f"{self.name} has no {CONFIG}, which says what the model is.")
        with long_work(f"fetching {CONFIG} of {self.name}", in_bytes=True) as work:
            self._get(described_by(self.sizes), work)
        return self._preview(folder, refused)

    def _preview_gguf(self, parts: Sequence[str]) -> Preview:
        folder, source = self._folder, source_text(self.source)
        if self.sizes is None or all((folder / part).is_file() for part in parts):
            return dataclasses.replace(preview(folder / parts[0]), source=source)
        with tempfile.TemporaryDirectory() as headers, long_work(f"fetching the header of {self.name}"):
            files = [Path(headers, Path(part).name) for part in parts]
            for part, file in zip(parts, files, strict=True):
                _download_header(self.name, part, self.hash, file, self.sizes[part])
            seen = preview(files[0])
        refused = tuple(reason.replace(headers, str(self)) for reason in seen.refused)
        return dataclasses.replace(seen, refused=refused, source=source)

    def _preview(self, folder: Path, refused: Sequence[str] = ()) -> Preview:
        seen, source = preview(folder, weights=False), source_text(self.source)
        if not refused:
            return dataclasses.replace(seen, source=source)
        return Preview(None, (*seen.refused, *refused), source)

    def _require_weights(self, sizes: Mapping[str, int]) -> None:
        """Raise HubError for a repository without safetensors, which says what there is."""
        if "adapter_config.json" in sizes and CONFIG not in sizes:
            raise HubError(f"{self.name} is a LoRA adapter; load its base model, and pass the adapter in `adapters`.")
        if _has_safetensors(sizes):
            return
        files = [name for name in sizes if name.endswith((".safetensors", *_PICKLES))]
        has = f"only {', '.join(files[:3])}{', ...' * (len(files) > 3)}" if files else "and no other weights"
        remedy = "name a repository of a model"
        if any(name.endswith(_PICKLES) for name in files):
            remedy = (
                "pickles can run code, so they are not read: name a revision with safetensors (ORG/NAME@refs/pr/N, if "
                "a pull request has them), or save them with save_pretrained(DIR, safe_serialization=True)"
            )
        elif files:
            remedy = "it is a pipeline of several models, which is not implemented"
        raise HubError(f"{self.name} has no safetensors in its top folder, {has}; {remedy}.")

    def _weights(self, folder: Path, sizes: Mapping[str, int]) -> list[str]:
        """The names of the files that the weights are in, as the converter will choose them."""
        if SINGLE in sizes:
            return [SINGLE]
        if INDEX in sizes:
            names = sorted(read_index(folder))
            if missing := [name for name in names if name not in sizes or not name.endswith(".safetensors")]:
                raise HubError(f"{self}: {INDEX} lists {', '.join(missing)}, which are not there as safetensors.")
            return names
        names = [name for name in sizes if "/" not in name and name.endswith(".safetensors")]
        if len(names) > 1:
            raise HubError(f"{self} has {len(names)} safetensors files, but neither {SINGLE} nor {INDEX}.")
        return names

    def _dense(self, folder: Path) -> list[str]:
        """The names of the files with the weights behind a sentence encoder's pooling."""
        names = dense_weights(folder)
        if self.sizes is not None and (missing := [name for name in names if name not in self.sizes]):
            raise HubError(f"{self} has no {missing[0]}: pickles can run code, so only safetensors are read.")
        return names

    def _check(self, folder: Path) -> None:
        try:
            check_description(folder)
        except CheckpointError as error:
            raise HubError(str(error).replace(str(folder), str(self))) from error

    def _get(self, names: Sequence[str], work: LongWork) -> None:
        """Fetch files, unless they were."""
        assert self.sizes is not None
        done = work.done
        for name in names:
            _download(self.name, name, self.hash, _bar_of(work))
            done += self.sizes[name]
            work.update(done=done)  # whether it was fetched or there

    def _require_cached(self, folder: Path) -> None:
        """Raise the error of the hub unless all files are in its cache."""
        assert self.error is not None
        if not folder.is_dir():
            raise self.error
        try:
            SafetensorsFolder(folder)
        except CheckpointError as error:
            raise UnreachableError(f"{self.error} (In its cache: {error})") from error


def _has_safetensors(files: Collection[str]) -> bool:
    """Tell whether a repository has weights in its top folder."""
    return any("/" not in name and name.endswith(".safetensors") for name in files)


def find(name: HubName, known: str | None = None) -> Commit:
    """Find the commit that a name means.

    Args:
      name: the repository and the revision.
      known: the commit that the revision meant when it was last asked for, for the case that the hub does not answer.

    Raises HubError for a repository or a revision that does not exist, or may not be read; UnreachableError if the hub
    does not answer, and neither `known` nor its cache on this machine says which commit is meant.
    """
    try:
        return _ask(name)
    except UnreachableError as error:
        noted = _cache_of(name.repository) / "refs" / name.revision
        commit = name.revision if name.pinned else known or (noted.read_text() if noted.is_file() else None)
        if commit is None:
            raise
        if not (name.pinned or _offline()):
            _log.warning("The hub does not answer: %s is taken as it was when it last did, at %s.", name, commit[:12])
        return Commit(name, commit, None, error)


def _ask(name: HubName) -> Commit:
    import huggingface_hub

    with _explained(name):
        hub = huggingface_hub.HfApi(library_name="jaxinfer")

        def ask() -> huggingface_hub.ModelInfo:
            return hub.model_info(
                name.repository, revision=name.revision, timeout=ANSWER_SECONDS / 2, files_metadata=True
            )

        with long_work(f"asking the hub for {name}"):
            asking = DaemonThreads(1, "jaxinfer-hub")
            info = asking.submit(ask).result(ANSWER_SECONDS)  # a look-up of a name has no limit of its own
    assert info.sha is not None
    return Commit(name, info.sha, {file.rfilename: file.size or 0 for file in info.siblings or []})


def _download(name: HubName, file: str, revision: str, bar: type | None = None) -> None:
    import huggingface_hub
    from huggingface_hub.utils import logging as hub_logging

    said = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # what went wrong is told once, when it is not mended by trying again
    bar = bar or _bar_of(None)
    try:
        with _explained(name, file):
            huggingface_hub.hf_hub_download(
                name.repository, file, revision=revision, library_name="jaxinfer", tqdm_class=bar
            )
    finally:
        hub_logging.set_verbosity(said)


def _download_header(name: HubName, file: str, revision: str, out: Path, size: int) -> None:
    """Download the beginning of a GGUF file, with its header. The rest of its `size` bytes is a hole in `out`."""
    import huggingface_hub
    from huggingface_hub import constants, utils

    url = huggingface_hub.hf_hub_url(name.repository, file, revision=revision)
    headers = utils.build_hf_headers(library_name="jaxinfer") | {"Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    stream = utils.get_session().stream("GET", url, headers=headers, timeout=timeout)
    with _explained(name, file), stream as response:
        utils.hf_raise_for_status(response)
        with out.open("wb") as content:
            due = HEADER_BYTES
            for chunk in response.iter_bytes(HEADER_BYTES):
                content.write(chunk)
                if content.tell() >= due:
                    content.flush()
                    if has_header(out, size, ROPE_FACTORS):
                        break
                    due *= 2
    os.truncate(out, size)


def _bar_of(work: LongWork | None) -> type:
    """A class that `huggingface_hub` takes for tqdm's, and tells of the bytes of a file."""

    class Bar:
        def __init__(self, *_: object, initial: int = 0, **__: object):
            self.update(initial)

        def update(self, n: float | None = 1) -> None:
            if work is not None:
                work.advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Ignore bytes on the network, which are counted again when they are written."""

        def set_postfix_str(self, *_: object, **__: object) -> None:
            """Ignore the rate."""

        set_transfer_postfix_str = set_postfix_str

        def close(self) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar


def _cache_of(repository: str) -> Path:
    """The folder of a repository in the hub's cache on this machine, with its `refs` and `snapshots`."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / f"models--{repository.replace('/', '--')}"


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _check_room(what: str, sizes: Mapping[Path, int]) -> None:
    """Raise HubError if the disks of folders have less room than is needed there."""
    needed, places = Counter[int](), {}
    for folder, size in sizes.items():
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        needed[device := place.stat().st_dev] += size
        places[device] = place
    for device, size in needed.items():
        if (free := shutil.disk_usage(places[device]).free) < size:
            raise HubError(
                f"{what}: downloading and converting its weights needs {size / 1e9:.2f} GB in {places[device]}, and "
                f"{free / 1e9:.2f} GB are free; free some, or set HF_HOME or JAXINFER_CACHE to another disk."
            )


@contextlib.contextmanager
def _explained(name: HubName, file: str = "") -> Iterator[None]:
    """Raise what goes wrong between here and the hub as an error of one line, which says what to do."""
    from huggingface_hub import constants, errors

    what, page = f"{name}: {file}" if file else f"{name}", f"{constants.ENDPOINT}/{name.repository}"
    by_hand = (
        f"download it on a machine with a network (`hf download {name.repository} --local-dir DIR`) and name DIR here"
    )
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its licence at {page}, and log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: no such folder here, and no such repository at {constants.ENDPOINT}; correct the name, or, if it "
            "is private, log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name.repository} has no revision {name.revision!r}; see {page}/commits for its revisions."
        ) from error
    except errors.HFValidationError as error:
        raise HubError(f"{name}: no such folder here, and not a valid repository name: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise UnreachableError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids downloads: unset it, or {by_hand}."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubError(
                f"{what}: the hub refused access ({status}); log in with `hf auth login` or set HF_TOKEN."
            ) from error
        raise UnreachableError(f"{what}: the hub answered {status}; try again later, or {by_hand}.") from error
    except (TimeoutError, errors.LocalEntryNotFoundError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise UnreachableError(
            f"{what}: {constants.ENDPOINT} does not answer; check the network and try again (files that are complete "
            f"are kept), or {by_hand}."
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HubError(
                f"{what}: the disk of {constants.HF_HUB_CACHE} is full; free some space, or set HF_HOME to another one."
            ) from error
        raise HubError(f"{what}: {error}") from error
