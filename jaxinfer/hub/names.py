"""How a repository of the hub is written: ORG/NAME, with @REVISION for another revision than `main`.

A tag at the end, as in ORG/NAME:Q4_K_M, means one of its GGUF files.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Self

_PART = r"[A-Za-z0-9_][\w.-]*"  # a path that begins with a dot is a folder
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(@(?P<revision>[\w./-]+))?(:(?P<tag>[\w.-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

SCHEME = "hf://"
"""A model in a file that begins so is a repository: ORG/NAME without it is a path, which may be missing for now."""


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository and a revision of it, and maybe one of its GGUF files.

    Attributes:
      repository: ORG/NAME.
      revision: a branch, a tag, or the 40 digits of a commit.
      tag: how the matrices of the GGUF file are stored, in upper case, such as Q4_K_M; empty: none is named.
    """

    repository: str
    revision: str = "main"
    tag: str = ""

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> Self | None:
        """Parse a repository's name; None for a string that can only be a path.

        >>> HubName.parse("Qwen/Qwen3-0.6B@main")
        HubName(repository='Qwen/Qwen3-0.6B', revision='main', tag='')
        >>> HubName.parse("Qwen/Qwen3-0.6B-GGUF:Q8_0").tag
        'Q8_0'
        >>> HubName.parse("./models/qwen")
        """
        match = _NAME.fullmatch(os.fspath(text))
        return match and cls(match["repository"], match["revision"] or "main", (match["tag"] or "").upper())

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def model(self) -> str:
        """The model in the repository: its name, and the tag of the GGUF file."""
        return f"{self.repository}:{self.tag}" if self.tag else self.repository

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}{self.tag and f':{self.tag}'}"


def model_in_file(field: str, text: str, folder: Path) -> Path | HubName:
    """Return the model that a field of a file names: a path from the file's folder, or hf://ORG/NAME.

    Raises ValueError, naming the field.
    """
    if not text.startswith(SCHEME):
        return folder / text
    if (repository := HubName.parse(text.removeprefix(SCHEME))) is None:
        raise ValueError(
            f"{field} must be {SCHEME}ORG/NAME, {SCHEME}ORG/NAME@REVISION or {SCHEME}ORG/NAME:TAG, got {text!r}."
        )
    return repository
