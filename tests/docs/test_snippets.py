"""What README and docs show is true: blocks run and print what stands below them, commands have their options."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import (
    ROOT,
    Block,
    check,
    check_command,
    check_line,
    check_played,
    commands_in_prose,
    printed_lines,
    read_blocks,
    runs,
    shown,
    typed,
)
from tests.terminal import COLUMNS, play

PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))]


def blocks(page):
    return read_blocks(page, (ROOT / page).read_text())


@pytest.fixture
def reader(tmp_path):
    """Run blocks of a page one after the other in a terminal, in a folder with `examples`, and check them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUM_CPU_DEVICES")  # a page that needs several devices makes them

    def run(blocks):
        played = play([sys.executable, *typed(blocks)], cwd=tmp_path, environment=environment)
        check_played(blocks, played, tmp_path)
        return played

    return run


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_and_commands_are_sound(page):
    for block in blocks(page):
        check(block)
    for command in commands_in_prose((ROOT / page).read_text()):
        check_line(command)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_outputs_fit_in_a_terminal(page):
    wide = [line for block in blocks(page) for line in (block.output or "").splitlines() if len(line) > COLUMNS]
    assert wide == []


@pytest.mark.slow
def test_what_a_newcomer_runs_first_prints_what_is_shown(reader):
    first = next(block for block in blocks(Path("README.md")) if runs(block))
    assert first.output
    reader([first])


TOURED = ("README.md", "docs/how-to")  # by tests/newcomer/test_tour.py
RUN = [page for page in PAGES if any(map(runs, blocks(page))) and not str(page).startswith(TOURED)]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=str)
def test_blocks_run_and_print_what_is_shown(page, reader):
    reader([*filter(runs, blocks(page))])


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
    first, second = Block(PAGE, 3, "python", "a = 1"), Block(PAGE, 7, "python", "print(a)", output="1\n")
    assert reader([first, second]).lines[-1] == "1"
    with pytest.raises(AssertionError, match=r"page.md:9: status 1\n(.*\n)*.*page.md., line 10"):
        reader([first, Block(PAGE, 9, "python", "\nprint(b)")])


def test_commands_run_in_the_readers_directory(reader):
    reader(
        [Block(PAGE, 1, "sh", "ls -d examples/demo_model\njaxinfer --version >/dev/null", output="examples/demo_model")]
    )
    with pytest.raises(AssertionError, match=r"page\.md:1: status 1"):
        reader([Block(PAGE, 1, "sh", "false\ntrue")])
    with pytest.raises(AssertionError, match=r"page\.md:1 prints"):
        reader([Block(PAGE, 1, "sh", "echo b", output="a")])
    with pytest.raises(AssertionError, match="more than 80 columns"):
        reader([Block(PAGE, 1, "sh", "printf 'x%.0s' {1..81}")])


def test_outputs_are_compared():
    assert shown("a\n...\nc\n", "a\nb\nc\n")
    assert shown("c\n", "a note\nc\n[8 tokens]\n")
    assert not shown("a\n", "a\nb\n")
    assert not shown("a\n", "b\n")
    assert not shown("1\n", "11\n")


def test_lines_are_what_a_terminal_keeps():
    assert printed_lines("\x1b[1mloading ...\r\x1b[Kdone\r\n\x1b[32mx\x1b[0m") == ["done", "x"]
