"""What README and docs show is true: blocks run and print what stands below them, commands have their options."""

import doctest
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.prepared import PREPARED
from tests.docs.snippets import ROOT, Block, check, check_command, check_line, commands_in_prose, read_blocks, run

PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    return read_blocks(page, (ROOT / page).read_text())


def runs(block):
    return block.language in ("python", "sh") and not block.needs


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The reader's working directory and environment: a clone without its tests, and its commands."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_and_commands_are_sound(page):
    for block in blocks(page):
        check(block)
    for command in commands_in_prose((ROOT / page).read_text()):
        check_line(command)


RUN = [page for page in PAGES if any(runs(block) for block in blocks(page))]


def run_all(blocks, reader):
    """Run the blocks of a page, which share their names."""
    namespace = {"__name__": "__main__"}
    for block in blocks:
        printed = run(block, namespace, reader)
        if block.output is not None:
            assert shown(block.output, printed), f"{block} prints\n{printed}"


def test_what_a_newcomer_runs_first_prints_what_is_shown(reader):
    first = next(block for block in blocks(Path("README.md")) if runs(block))
    assert first.output
    run_all([first], reader)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=str)
def test_blocks_run_and_print_what_is_shown(page, reader):
    PREPARED.get(page, lambda folder: None)(Path.cwd())
    run_all(filter(runs, blocks(page)), reader)


def shown(output, printed):
    """Compare; `...` stands for anything."""
    return doctest.OutputChecker().check_output(output, printed, OPTIONS)


# What is wrong is found


PAGE = Path("page.md")


def page_of(language, code):
    return f"# Page\n\n```{language}\n{code}\n```\n"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "async with a:\n    pass\n)"),
        ("toml", "a = "),
        ("sh", "jaxinfer generate DIR --no-such-option"),
        ("sh", "jaxinfer nothing"),
        ("sh", "jaxinfer generate DIR --max-batch two"),
        ("sh", "python -m benchmarks.quality --no-such-option"),
        ("sh", "cd there && python -m benchmarks.quality --json"),
        ("sh", "python examples/nothing.py"),
        ("sh", "python examples/embed.py --no-such-option"),
        ("sh", "make nothing"),
        ("sh", "pip install -e '.[nothing]'"),
        ("sh", "pytest tests/nothing"),
        ("sh", "nothing"),
    ],
)
def test_blocks_that_are_not_sound_are_found(language, code):
    (block,) = read_blocks(PAGE, page_of(language, code))
    with pytest.raises(Exception, match=r"\w"):
        check(block)


def test_commands_in_prose_are_found():
    text = "Take `jaxinfer generate DIR` or `python -m benchmarks.quality\n--quick`, `jaxinfer` and `LLM`."
    assert [*commands_in_prose(text)] == ["jaxinfer generate DIR", "python -m benchmarks.quality --quick"]
    with pytest.raises(Exception, match="no-such-option"):
        check_command("jaxinfer", "generate", "DIR", "--no-such-option")


def test_blocks_know_their_lines_needs_and_outputs():
    text = "<!-- needs: gpu -->\n```sh\npytest -m gpu\n```\n"
    text += "\n- a\n\n  ```python\n  1 / 0\n  ```\n\n  ```text\n  x\n  ```\n"
    assert read_blocks(PAGE, text) == [
        Block(PAGE, 3, "sh", "pytest -m gpu\n", "gpu"),
        Block(PAGE, 9, "python", "1 / 0\n", "", "x\n"),
    ]


@pytest.mark.parametrize("text", ["<!-- needs: luck -->\n```sh\nls\n```", "```\nls\n```", "    ls", "```ruby\n1\n```"])
def test_blocks_of_unknown_needs_or_languages_are_refused(text):
    (block,) = read_blocks(PAGE, text)
    with pytest.raises(AssertionError, match="is none of"):
        check(block)


def test_blocks_share_names_and_fail_with_their_line(reader):
    namespace = {}
    run(Block(PAGE, 3, "python", "a = 1"), namespace, reader)
    assert run(Block(PAGE, 7, "python", "print(a)"), namespace, reader) == "1\n"
    with pytest.raises(NameError) as error:
        run(Block(PAGE, 9, "python", "\nprint(b)"), namespace, reader)
    assert error.traceback[-1].lineno == 9  # from 0


def test_commands_run_in_the_readers_directory(reader):
    assert run(Block(PAGE, 1, "sh", "ls -d examples/demo_model\njaxinfer --version"), {}, reader).startswith("examples")
    with pytest.raises(AssertionError, match="status 1"):
        run(Block(PAGE, 1, "sh", "false\ntrue"), {}, reader)


def test_outputs_are_compared():
    assert shown("a\n...\nc\n", "a\nb\nc\n")
    assert not shown("a\n", "b\n")
