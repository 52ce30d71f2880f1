"""Which GGUF file of a repository a name means: the one with its tag, as in llama.cpp and ollama. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

from jaxinfer.checkpoints.paths import gguf_name, part_names
from jaxinfer.hub.errors import HubError
from jaxinfer.hub.names import HubName

_TAG = re.compile(r"(?:^|[-.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE)
"""The end of a file's name: how its matrices are stored. UD-: as Unsloth does it."""
_BESIDE = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)|^mtp-", re.IGNORECASE)
"""In names of files that are beside a model: what sees images, statistics, and what predicts further tokens."""


def choose(name: HubName, files: Iterable[str]) -> list[str]:
    """Choose the GGUF file that a name means: all its parts, the first one first.

    Args:
      name: with the tag of a file, in upper or lower case; without one, the repository has only one model.
      files: of the repository.

    Raises HubError, which lists what there is, if there is no such file, or several, or if it lacks a part.
    """
    there = {file for file in files if file.lower().endswith(".gguf")}
    models = sorted({_first(file) for file in there if not _BESIDE.search(PurePosixPath(file).name)})
    chosen = [model for model in models if not name.tag or _tag(model).casefold() == name.tag.casefold()]
    if len(chosen) != 1:
        raise HubError(_none_or_several(name, models, chosen))
    first = PurePosixPath(chosen[0])
    parts = [str(first.with_name(part)) for part in part_names(first.name)]
    if missing := [part for part in parts if part not in there]:
        raise HubError(f"{name}: the repository lacks {', '.join(missing[:3])}, of {len(parts)} parts; choose another.")
    return parts


def _first(file: str) -> str:
    """The first part of the GGUF file that a file is a part of; itself if it is not split."""
    path = PurePosixPath(file)
    return str(path.with_name(part_names(path.name)[0]))


def _tag(file: str) -> str:
    """The tag in a file's name; empty if it has none."""
    match = _TAG.search(gguf_name(PurePosixPath(file).name))
    return match[1] if match else ""


def _none_or_several(name: HubName, models: list[str], chosen: list[str]) -> str:
    by_tag = defaultdict[str, list[str]](list)
    for model in models:
        by_tag[_tag(model)].append(model)
    tags = sorted(tag for tag, tagged in by_tag.items() if tag and len(tagged) == 1)
    untagged = [model for model in models if _tag(model) not in tags]
    there = ", ".join([*(f":{tag}" for tag in tags), *untagged]) or "none"
    what = f"no GGUF file has the tag {name.tag}" if name.tag else f"it has {len(models)} models as GGUF files"
    if name.tag and chosen:
        what = f"{len(chosen)} GGUF files have the tag {name.tag}"
    by_hand = f"; or download a file with `hf download {name.repository} FILE --local-dir DIR`, and name DIR/FILE here"
    return f"{name}: {what}; there are {there}. Name one by its tag{by_hand if untagged else ''}."
