"""README and the pages for users stay readable: short sentences, short cells, common words."""

import itertools
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "decisions"),
]
MAX_WORDS = 35
MAX_CELL = 250
MAX_FEATURE = 200
RARE_WORDS = ("beside", "anew", "so many", "lest")
MAX_RARE_WORDS = 30


def texts(page):
    """The plain text of each paragraph or item, and of each cell of a table."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    prose, cells = [], []
    for before, token in itertools.pairwise(tokens):
        if token.type == "inline":
            text = "".join(
                "X" if child.type == "code_inline" else " " if child.type == "softbreak" else child.content
                for child in token.children
            )
            (cells if before.type in ("td_open", "th_open") else prose).append(text)
    return prose, cells


def sentences(text):
    return re.split(r"(?<=[.!?])\s+", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_cells_are_short(page):
    prose, cells = texts(page)
    assert [x for text in prose for x in sentences(text) if len(x.split()) > MAX_WORDS] == []
    assert [cell for cell in cells if len(cell) > MAX_CELL] == []


def test_a_feature_has_one_short_line():
    lines = (ROOT / "docs/features.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|") and len(line) > MAX_FEATURE] == []


def test_rare_words_are_rare():
    text = " ".join(page.read_text().lower() for page in PAGES)
    found = {word: len(re.findall(rf"\b{word}\b", text)) for word in RARE_WORDS}
    assert sum(found.values()) <= MAX_RARE_WORDS, found


def test_long_sentences_and_rare_words_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Head\n\n" + "word " * 36 + f". Short `code here`.\n\n| a | b |\n|-|-|\n| {'x' * 251} | c |\n")
    prose, cells = texts(page)
    assert [len(x.split()) for text in prose for x in sentences(text)][1:] == [37, 2]
    assert max(map(len, cells)) == 251


def test_the_changelog_has_a_line_for_each_change():
    text = (ROOT / "CHANGELOG.md").read_text()
    first = text[text.index("## [0.1.0]") :]
    assert len(first.splitlines()) <= 120
    assert all(len(line) <= 120 for line in text.splitlines())
