"""Prose in Markdown is wrapped: paragraphs, lists and quotes; not tables, code, headings and comments."""

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
WIDTH = 120
PAGES = sorted(
    page.relative_to(ROOT)
    for folder in (ROOT, *(path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
    for page in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)


def long_lines(text):
    """Return the numbers of the lines of prose that are longer than WIDTH and could be broken."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    prose = [range(*token.map) for token in tokens if token.type == "paragraph_open"]  # a table's cells are none
    lines = text.splitlines()
    return [i + 1 for block in prose for i in block if len(lines[i]) > WIDTH and " " in lines[i].strip(" >-*")]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_prose_is_wrapped(page):
    assert not long_lines((ROOT / page).read_text())


def test_all_pages_are_looked_at():
    assert {Path("README.md"), Path("docs/structure.md"), Path("docs/decisions/README.md")} <= set(PAGES)


LONG = "word " * 30


@pytest.mark.parametrize(
    "text", [LONG, f"- {LONG}", f"1. a\n\n   - b\n     {LONG}", f"> {LONG}", f"a\n{LONG}\nb", f"- `{LONG}`"]
)
def test_long_prose_is_found(text):
    assert len(long_lines(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"# {LONG}",
        f"| a | b |\n|---|---|\n| {LONG} | 1 |",
        f"```\n{LONG}\n```",
        f"    {LONG}",
        f"<!-- {LONG} -->",
        f"- [one](https://example.org/{'x' * WIDTH})",
        "word " * 20,
    ],
)
def test_what_cannot_be_wrapped_may_be_long(text):
    assert long_lines(text) == []
