"""README is short enough to be read, and pages lead somewhere where they are read as files."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def links(text):
    """Return the relative addresses of links and pictures, without anchors, which `make docs` checks."""
    tokens = [child for token in MarkdownIt("commonmark").enable("table").parse(text) for child in token.children or ()]
    addresses = [token.attrs.get("href", token.attrs.get("src", "")) for token in tokens]
    return {address.partition("#")[0] for address in addresses if address and ":" not in address} - {""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    assert [link for link in links(page.read_text()) if not (page.parent / link).exists()] == []


def test_links_are_found():
    assert links("[a](a.md#b) ![c](c.svg) [d](https://e.org) [f](#g)\n\n| x |\n|-|\n| [h](h/) |") == {
        "a.md",
        "c.svg",
        "h/",
    }


def test_paths_on_the_page_of_structure_exist():
    text = (ROOT / "docs/structure.md").read_text()
    spans = [span for span in re.findall(r"`([\w/.-]+)`", text) if span.endswith((".py", "/"))]
    rooms = ("jaxinfer", "pallas_kernels", "sharding", "checkpoints", "benchmarks", "tests", "docs", "examples")
    folders = [ROOT / name for name in rooms]
    known = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(spans) > 100
    assert [span for span in spans if not any(path.endswith(f"/{span.rstrip('/')}") for path in known)] == []


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150
