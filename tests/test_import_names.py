"""Folders that `jaxinfer` has links to are imported by one name, where tools that check imports see them."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("pallas_kernels", "sharding", "checkpoints")


@pytest.mark.parametrize("folder", LINKED)
def test_a_folder_is_a_link(folder):
    link = ROOT / "jaxinfer" / folder
    assert link.is_symlink(), f"{link} is a file: check out with symbolic links (git config core.symlinks true)"
    assert link.resolve() == ROOT / folder
    assert (link / "__init__.py").exists()


BARE = "import {0}", "from {0} import x", "from {0}.x import y", "def f():\n    import {0}.x"


@pytest.mark.parametrize("file", ["jaxinfer/new.py", "sharding/new.py", "tests/test_new.py", "benchmarks/new.py"])
def test_a_bare_import_is_refused(file):
    lines = [form.format(folder) for folder in LINKED for form in BARE]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    command += ["--stdin-filename", file, "-"]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 1
    for folder in LINKED:
        assert done.stdout.count(f"TID251 `{folder}` is banned: import jaxinfer.{folder}\n") == len(BARE), done.stdout


def test_contracts_are_checked_in_linked_folders():
    graph = grimp.build_graph("jaxinfer", cache_dir=None)
    for folder in LINKED:
        files = {path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / folder).rglob("*.py")}
        modules = {".".join(("jaxinfer", *parts)).removesuffix(".__init__") for parts in files}
        assert modules
        assert modules <= graph.modules
    assert graph.direct_import_exists(importer="jaxinfer.models", imported="jaxinfer.pallas_kernels", as_packages=True)
