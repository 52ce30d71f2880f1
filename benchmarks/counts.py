"""How large and how tangled the code is, by counts that a change can be compared by.

    python -m benchmarks.counts [CHECKOUT ...]

Prints the counts of this checkout, or of others next to one another. `tests/test_counts.py` holds them below limits.
"""

import ast
import collections
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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

FRONTS = {
    "jaxinfer/generation/api/async_llm.py": "AsyncLLM",
    "jaxinfer/experts/system.py": "System",
    "jaxinfer/elastic/service.py": "Service",
}
VERBS = {"submit", "make_query", "query", "judge", "run", "classify", "generate", "chat", "embed"}
VERBS |= {"stats", "statistics", "num_requests", "waiting"}
"""Public names by which services are asked and counted."""


def count(root: Path = ROOT) -> dict[str, int]:
    """Count a checkout's code, by the name of each count."""
    sources = {path: path.read_text() for path in _files(root, "jaxinfer", "sharding", "checkpoints", "pallas_kernels")}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    others = {path: ast.parse(path.read_text()) for path in _files(root, "benchmarks", "examples")}
    ours = {path: tree for path, tree in trees.items() if "jaxinfer" in path.relative_to(root).parts}
    lines = {file: len(sources.get(root / file, "").splitlines()) for file in FORWARD}
    return {
        f"functions of {LONG_FUNCTION} lines or more": _long(trees | others, ast.FunctionDef, LONG_FUNCTION),
        f"classes of {LARGE_CLASS} lines or more": _long(trees | others, ast.ClassDef, LARGE_CLASS),
        "names of several classes": sum(len(files) > 1 for files in _classes(ours).values()),
        "imports of generation in experts and elastic": sum(
            name.startswith("jaxinfer.generation")
            for path, tree in ours.items()
            if path.relative_to(root).parts[1] in ("experts", "elastic")
            for name in _imports(tree)
        ),
        "calls of Costs.open": sum(text.count("Costs.open(") for text in sources.values()),
        "names by which services are asked and counted": len(_verbs(root, trees)),
        "lines of what runs stateless batches": sum(lines.values()),
        "lines of Service": max(_sizes(trees, "Service"), default=0),
    }


def _files(root: Path, *folders: str) -> Iterator[Path]:
    """The files of folders, each once: `jaxinfer` has links to others."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root)):
                yield path


def _long(trees: dict[Path, ast.Module], kind: type[ast.FunctionDef | ast.ClassDef], least: int) -> int:
    return sum(
        isinstance(node, kind) and _num_lines(node) >= least for tree in trees.values() for node in ast.walk(tree)
    )


def _num_lines(node: ast.FunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _classes(trees: dict[Path, ast.Module]) -> dict[str, set[Path]]:
    """The files of each class name. Kernels are left out: each has its own plan, inputs and scratch memory."""
    files: dict[str, set[Path]] = collections.defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path)
    return files


def _sizes(trees: dict[Path, ast.Module], name: str) -> list[int]:
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    return [_num_lines(node) for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _verbs(root: Path, trees: dict[Path, ast.Module]) -> set[str]:
    """The names of `VERBS` that services have, inherited ones included."""
    files = [*FRONTS, "jaxinfer/serving/served.py", "jaxinfer/generation/api/holder.py"]
    functions = (node for file in files if root / file in trees for node in ast.walk(trees[root / file]))
    return {f.name for f in functions if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)} & VERBS


def main(folders: list[str], show: Callable[[str], None] = print) -> None:
    """Print the counts of some checkouts, a column each."""
    columns = [count(Path(folder).resolve()) for folder in folders] or [count()]
    for name in columns[0]:
        show(f"{name:<48}" + "".join(f"{column[name]:>8}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
