"""How large and how tangled the code is, by counts that a change can be compared by.

    python -m benchmarks.counts [CHECKOUT ...]

Prints the counts of this checkout, or of others next to one another. `tests/test_counts.py` holds them below limits.
"""

import ast
import collections
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

ROOT = Path(__file__).parents[1]
PACKAGE = ("jaxinfer", "sharding", "checkpoints", "pallas_kernels")
LONG_FUNCTION = 70
LARGE_CLASS = 400

FORWARD = (
    "jaxinfer/execution/forward.py",
    "jaxinfer/generation/execution/encoder.py",
    "jaxinfer/generation/execution/images.py",
    "jaxinfer/generation/execution/programs/embed.py",
    "jaxinfer/generation/execution/programs/embed_images.py",
    "jaxinfer/experts/execution/architectures.py",
    "jaxinfer/elastic/programs.py",
)
"""The files by which batches go through stateless models."""

FRONTS = (
    "jaxinfer/generation/api/async_llm.py",
    "jaxinfer/generation/api/holder.py",
    "jaxinfer/experts/system.py",
    "jaxinfer/elastic/service.py",
    "jaxinfer/serving/served.py",
)
"""The files of services."""
VERBS = {"submit", "make_query", "query", "judge", "run", "classify", "generate", "chat", "embed"}
VERBS |= {"stats", "statistics", "num_requests", "waiting"}
"""Public names by which services are asked and counted."""


def count(root: Path = ROOT) -> dict[str, int]:
    """Count a checkout's code, by the name of each count."""
    package = [
        Module.read(root, path) for path in _files(root, "jaxinfer", "sharding", "checkpoints", "pallas_kernels")
    ]
    others = [Module.read(root, path) for path in _files(root, "benchmarks", "examples")]
    rooms = [module for module in package if module.name.startswith("jaxinfer/")]
    functions = [node for module in package + others for node in module.functions]
    classes = [node for module in package + others for node in module.classes]
    return {
        f"functions of {LONG_FUNCTION} lines or more": sum(_num_lines(node) >= LONG_FUNCTION for node in functions),
        f"classes of {LARGE_CLASS} lines or more": sum(_num_lines(node) >= LARGE_CLASS for node in classes),
        "names of several classes": _shared_names(rooms),
        "imports of generation in experts and elastic": sum(
            name.startswith("jaxinfer.generation")
            for module in rooms
            if module.name.split("/")[1] in ("experts", "elastic")
            for name in module.imports
        ),
        "calls of Costs.open": sum(module.text.count("Costs.open(") for module in package),
        "names by which services are asked and counted": len(
            VERBS & {node.name for module in rooms if module.name in FRONTS for node in module.functions}
        ),
        "lines of what runs stateless batches": sum(
            len(module.text.splitlines()) for module in rooms if module.name in FORWARD
        ),
        "lines of Service": max((_num_lines(node) for node in classes if node.name == "Service"), default=0),
    }


class Module(NamedTuple):
    """A file: its name in the checkout, and what it has."""

    name: str
    text: str
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef]
    classes: list[ast.ClassDef]
    imports: list[str]

    @classmethod
    def read(cls, root: Path, path: Path) -> Self:
        """Parse a file."""
        module = cls(path.relative_to(root).as_posix(), path.read_text(), [], [], [])
        for node in ast.walk(ast.parse(module.text)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    module.functions.append(node)
                case ast.ClassDef():
                    module.classes.append(node)
                case ast.ImportFrom(module=str(name)):
                    module.imports.append(name)
                case ast.Import():
                    module.imports.extend(alias.name for alias in node.names)
        return module


def _files(root: Path, *folders: str) -> Iterator[Path]:
    """The files of folders, each once: `jaxinfer` has links to others."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root)):
                yield path


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _shared_names(modules: Sequence[Module]) -> int:
    """How many names classes of several files share. Kernels are left out: each has its own plan and inputs."""
    files = collections.Counter(name for module in modules for name in {node.name for node in module.classes})
    return sum(count > 1 for count in files.values())


def main(folders: list[str], show: Callable[[str], None] = print) -> None:
    """Print the counts of some checkouts, a column each."""
    columns = [count(Path(folder).resolve()) for folder in folders] or [count()]
    for name in columns[0]:
        show(f"{name:<48}" + "".join(f"{column[name]:>8}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
