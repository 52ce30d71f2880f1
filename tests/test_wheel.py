"""What is built for users: `jaxinfer` alone, whatever else has the names of its folders."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from jaxinfer.pallas_kernels.cpu.build import source_files

ROOT = Path(__file__).parents[1]
LINKED = ("pallas_kernels", "sharding", "checkpoints")

SCRIPT = """\
import sys

from jaxinfer import LLM, SamplingParams
import jaxinfer

llm = LLM(sys.argv[1], max_batch=1, context=64)
(output,) = llm.generate("def main():", SamplingParams(temperature=0, max_tokens=3))
assert not {"pallas_kernels", "sharding", "checkpoints"} & sys.modules.keys()
print(jaxinfer.__file__)
print(len(output.outputs[0].token_ids))
"""


def hatch(folder, target, out):
    """Build a wheel or an sdist of a source tree, and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (file,) = out.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[target])
    return file


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the source tree, without what is not in a fresh checkout."""
    ignored = shutil.ignore_patterns(
        ".git", ".*cache*", ".venv*", "__pycache__", "build", "dist", "layers-*", "*.egg-info"
    )
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", symlinks=True, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return hatch(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_a_wheel_has_the_sources_of_cpu_kernels(wheel):
    sources = {path.relative_to(ROOT / "pallas_kernels").as_posix() for path in source_files(ROOT / "pallas_kernels")}
    assert {"cpu/tasks.h", "linear/cpu/linear.cc"} <= sources
    assert {f"jaxinfer/pallas_kernels/{name}" for name in sources} <= set(names(wheel))


def test_a_wheel_has_the_servers_page(wheel):
    files = {f"jaxinfer/http/page/{path.name}" for path in (ROOT / "jaxinfer/http/page").iterdir()}
    assert {"jaxinfer/http/page/index.html", "jaxinfer/http/page/style.css", "jaxinfer/http/page/app.js"} <= files
    assert files <= set(names(wheel))


def test_a_wheel_has_one_package(wheel, tree):
    files = names(wheel)
    assert {PurePosixPath(file).parts[0] for file in files} == {"jaxinfer", "jaxinfer-0.1.0.dist-info"}
    for folder in LINKED:
        modules = {f"jaxinfer/{path.relative_to(tree)}" for path in (tree / folder).rglob("*.py")}
        assert modules
        assert modules <= set(files)


def test_a_wheel_is_typed_and_describes_itself(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert "jaxinfer/py.typed" in archive.namelist()
        metadata = email.message_from_bytes(archive.read("jaxinfer-0.1.0.dist-info/METADATA"))
    assert (metadata["Version"], metadata["Description-Content-Type"]) == ("0.1.0", "text/markdown")
    page = metadata.get_payload()
    assert page.startswith("# jaxinfer")
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", page), "links that lead nowhere on PyPI"


@pytest.mark.slow
def test_an_sdist_has_each_package_once_and_makes_the_same_wheel(wheel, tree, tmp_path):
    with tarfile.open(hatch(tree, "sdist", tmp_path / "sdist")) as archive:
        (top,) = {PurePosixPath(name).parts[0] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / top
    for folder in LINKED:
        module = f"{folder}/__init__.py"
        assert [path.relative_to(source) for path in source.rglob(module)] == [Path("jaxinfer") / module]
    assert names(hatch(source, "wheel", tmp_path / "wheel")) == names(wheel)


@pytest.mark.slow
def test_an_installed_wheel_generates_beside_modules_of_the_same_names(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", wheel], check=True, capture_output=True)
    hostile = tmp_path / "hostile"
    (hostile / "checkpoints").mkdir(parents=True)
    for file in ("sharding.py", "checkpoints/__init__.py", "pallas_kernels.py"):
        (hostile / file).write_text('raise SystemExit("hostile")\n')
    (hostile / "script.py").write_text(SCRIPT)
    # The dependencies of the running environment. Its editable installation of this tree is a .pth file, which Python
    # does not read in folders of PYTHONPATH.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [python, "script.py", ROOT / "examples/demo_model"]
    done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    version = subprocess.run([tmp_path / "venv/bin/jaxinfer", "--version"], env=environment, capture_output=True)
    assert version.stdout == b"jaxinfer 0.1.0\n", version.stderr
    imported, tokens = done.stdout.split()
    assert Path(imported).is_relative_to(tmp_path / "venv")
    assert tokens == "3"
