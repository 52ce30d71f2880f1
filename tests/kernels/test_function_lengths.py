"""Kernels stay readable: no function of the operations is longer than a screen or two."""

import ast
from pathlib import Path

MOST = 80
FOLDER = Path(__file__).parents[2] / "pallas_kernels"


def test_no_function_is_longer():
    lengths = {
        f"{path.relative_to(FOLDER)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MOST} == {}
