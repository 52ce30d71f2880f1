"""Folders on the server from which clients may name files."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.fields import shown
from jaxinfer.http.errors import BadRequestError


def find_inside(folders: Sequence[Path], path: str, param: str, what: str, files: Sequence[str] = ()) -> Path:
    """Return the place of a path, without symbolic links: in the first of the folders that has it.

    Raises BadRequestError unless it is in one of the folders. The error of a path elsewhere does not tell whether it
    exists.

    Args:
      folders: the folders.
      path: the client's path, relative to one of them, or absolute.
      param: the field that it comes from.
      what: a word for what the folders hold, for the error.
      files: the names of files in it, which must be in the same one of the folders.
    """
    candidates = []
    for folder in folders:
        root = folder.resolve()
        try:
            inside = (root / path).resolve()
            places = [(inside / name).resolve() for name in files]
            if inside != root and all(each.is_relative_to(root) for each in (inside, *places)):
                candidates.append(inside)
        except (OSError, ValueError, RuntimeError):  # too long, a null character, a circle of links
            continue
    if candidates:
        return next(filter(os.path.exists, candidates), candidates[0])
    raise BadRequestError(f"{param}: {shown(path)} is in no folder of {what}.", param=param)
