"""What a clone has: few binary files, and those marked as such."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MOST_BINARY = 220
LOOKED_AT = 8000
"""Bytes of a file in which git looks for a zero, which makes it binary."""


def _git(*arguments: str, given: str = "") -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, input=given, check=True, capture_output=True, text=True).stdout


def _tracked() -> list[str]:
    """Return the files that git tracks; skips where the tests are in no clone, as in a source distribution."""
    try:
        top = _git("rev-parse", "--show-toplevel").strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout")
    if pathlib.Path(top).resolve() != ROOT:
        pytest.skip("in a git checkout of something else")
    return _git("ls-files", "-z").split("\0")[:-1]


def _is_binary(name: str) -> bool:
    file = ROOT / name
    if file.is_symlink() or not file.is_file():  # a link's content is text; a file may be deleted and not yet committed
        return False
    with file.open("rb") as stream:
        return b"\0" in stream.read(LOOKED_AT)


def test_few_files_are_binary_and_all_are_marked():
    binary = [name for name in _tracked() if _is_binary(name)]
    assert 0 < len(binary) <= MOST_BINARY
    fields = _git("check-attr", "-z", "--stdin", "binary", given="\0".join(binary)).split("\0")[:-1]
    marks = dict(zip(fields[::3], fields[2::3], strict=True))  # between them is the name of the attribute
    assert marks == dict.fromkeys(binary, "set")
