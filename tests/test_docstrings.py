"""The words of the shipped packages: what docstrings begin with, and names that say nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.name for path in (ROOT / "jaxinfer").iterdir() if path.is_dir() and path.name != "__pycache__")

NAMES = {"found", "own", "one", "wanted", "of"}
LINE = re.compile(r"\s*(What|Of|Those|The same)\b")

# With one of these begins a description of the result, which is as good as "Return" and less monotonous.
ARTICLES = {"A", "An", "The", "Its", "All", "Each", "Every", "One"}
# Words that no imperative begins with. Ruff's D401 knows verbs in other moods, but takes most nouns for verbs.
OPENERS = """
    This That These Those It Two Three Some Such So Both Any No None Many Most More
    Whether Where Which What How Why When Who Whose Whatever Whoever If Then Also Only Not There Here Other Others
    Of As In On At By To Up From With Without Within For After Before Beside Between Like Under Over Through Until Than
    Accuracy Algorithm Bilinear Causal Cumulative Decreasing Done Gemma Half Height Hidden Instruction Intersection
    Kernel Largest LayerNorm Least Length Lower Maximum Mean Minimum Model Module Mosaic New Next Number Output Pair
    PiToMe Prompt Random Room Rotary Same Sequence Shape Shared Short Size Slope Smallest Softmax Source Symmetric Text
    Throughput Thunk ToMe Token Upper Utility Value Vector Work
    """
NOUN = re.compile(r"([^s]s|[^r]ing)$")  # plurals and third persons ("Bytes", "Raises"), "Padding"; but "Bring"


def says_what_it_does(docstring: str) -> bool:
    """Whether a function's docstring begins with an imperative, an article, or a formula (with no capital)."""
    opener, *rest = (word.strip(".,:;") for word in docstring.split()[:2])
    if opener in ARTICLES or not re.match("[A-Z0-9]", opener):
        return True
    if not opener.isalpha() or opener.isupper():  # "16-bit", "XLA's", "JSON"
        return False
    return opener not in OPENERS.split() and not NOUN.search(opener) and rest not in (["of"], ["->"])


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone: docstrings, and those after an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and name of everything that is given one."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store(), id=name) | ast.Attribute(ctx=ast.Store(), attr=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Each line at which the rules are broken, and how."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not is_property and not says_what_it_does(docstring):
                yield node.body[0].lineno, f"{node.name}: no imperative, and no article: {docstring.splitlines()[0]}"
    for docstring in docstrings(tree):
        for number, line in enumerate(docstring.value.splitlines(), docstring.lineno):
            if LINE.match(line):
                yield number, f"a docstring's line begins so: {line.strip()}"
    for number, name in names(tree):
        if name in NAMES:
            yield number, f"a name that is no noun: {name}"


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_words(room: str) -> None:
    folder = (ROOT / "jaxinfer" / room).resolve()
    files = sorted(folder.rglob("*.py") if room else folder.glob("*.py"))
    assert files
    broken = [
        f"{path.relative_to(ROOT)}:{number}: {message}"
        for path in files
        for number, message in sorted(complaints(path.read_text()))
    ]
    assert not broken, "\n" + "\n".join(broken)


def first_lines() -> Iterator[tuple[str, str, str]]:
    """The place and name of each function and class with a docstring, and its first line."""
    folders = (ROOT / "jaxinfer", *((ROOT / "jaxinfer" / room).resolve() for room in ROOMS))
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
                docstring := ast.get_docstring(node)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.name, docstring.splitlines()[0]


def test_docstrings_say_more_than_the_name() -> None:
    little = {"a", "an", "the", "of", "to", "return", "returns", "this", "its", "and", "in", "for"}
    repeated = [
        f"{place} {name}: {line}"
        for place, name, line in first_lines()
        if not set(re.findall(r"[a-z]+", line.lower())) - little - set(re.findall(r"[a-z]+", name.lower()))
    ]
    assert repeated == []


def test_few_docstrings_begin_with_return() -> None:
    assert sum(line.startswith("Return") for _, _, line in first_lines()) <= 400


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """This gives bytes."""',
        'async def f():\n    """Bytes of it."""',
        'def f():\n    """Padding, in bytes."""',
        'def f():\n    """Trace of a step."""',
        'def f():\n    """Name -> bytes."""',
        'def f():\n    """XLA\'s options."""',
        'class A:\n    """What it is."""',
        'a = 1\n"""Long enough.\n    Of an image."""',
        "found = 1",
        "def of(a): pass",
        "f = lambda one: 1",
        "self.own = 1",
        "match a:\n    case [*wanted]: pass",
    ],
)
def test_what_breaks_the_rules_is_seen(source: str) -> None:
    assert list(complaints(source))


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the bytes."""',
        'def f():\n    """The bytes."""',
        'def f():\n    """Pass and bring them."""',
        'def f():\n    """x W^T + b."""',
        'def f():\n    """[N, D] -> [N, D]."""',
        'class A:\n    @property\n    def f(self):\n        """The bytes."""',
        'a = 1\n"""Bytes; what is read of them."""',
        "print(found)",
    ],
)
def test_what_keeps_the_rules_passes(source: str) -> None:
    assert not list(complaints(source))
