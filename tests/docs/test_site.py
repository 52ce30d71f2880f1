"""The site: whole, without dead links (which `make docs` refuses), and on its own: nothing is fetched to read it."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import griffe
import pytest

from jaxinfer import EngineOptions, MemoryOptions

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
"""What a browser fetches from elsewhere, in HTML."""
ELSEWHERE = {"__version__", "elastic", "evaluation", "experts", "serving"}
"""Names of jaxinfer that are modules, which have pages of their own, or no part of the API."""


def build(project, folder):
    """Run what `make docs` does. (With --quiet it would not fail for a warning.)"""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    return subprocess.run(mkdocs, cwd=project, capture_output=True, text=True)


def test_every_name_of_the_api_has_its_place():
    page = (ROOT / "docs/api/generation.md").read_text()
    names = set(importlib.import_module("jaxinfer").__all__) - ELSEWHERE
    assert {name for name in names if f"::: jaxinfer.{name}\n" not in page} == set()


def documented(item):
    """An object of an API page, and what it exports or has inside it."""
    item = item.final_target if item.is_alias else item
    yield item
    for member in item.members.values():
        here = not member.is_alias or (item.is_module and member.target_path.startswith("jaxinfer."))
        if here and not member.name.startswith("_") and not (member.is_alias and member.final_target.is_module):
            yield from documented(member)


def test_each_attribute_and_parameter_has_an_entry():
    """Griffe takes the first of two names for a name with a comma, and the second for its type."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    loader.load("jaxinfer")
    loader.resolve_aliases(external=False)
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    wrong = set()
    for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE):
        for item in documented(loader.modules_collection[name]):
            for section in item.docstring.parse("google", warnings=False) if item.docstring else ():
                for entry in section.value if section.kind.value in ("attributes", "parameters") else ():
                    if "," in entry.name or re.search(r"\. [a-z_]+: ", entry.description):
                        wrong.add((item.path, entry.name))
    assert wrong == set()


def test_every_page_is_in_the_navigation():
    """Otherwise `make docs` refuses it: name it in mkdocs.yml, under `nav`."""
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f"- {page}\n" not in config and not page.startswith("decisions/0")} == set()


@pytest.mark.slow
def test_the_site_is_built_whole_and_fetches_nothing(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {page: FETCHED.findall(text) for page, text in pages.items() if FETCHED.search(text)} == {}
    assert 'id="jaxinfer-generate"' in pages["command-line.html"]
    assert [page for page, text in pages.items() if "&gt;&gt;&gt;" in text] == []  # a copy would have the prompts
    for module in ("jaxinfer", "jaxinfer.experts", "jaxinfer.elastic", "jaxinfer.serving", "jaxinfer.checkpoints"):
        page = pages[f"api/{module.removeprefix('jaxinfer.').replace('jaxinfer', 'generation')}.html"]
        names = set(importlib.import_module(module).__all__) - ELSEWHERE
        assert [name for name in sorted(names) if f'id="{module}.{name}"' not in page] == []
    for options in (EngineOptions, MemoryOptions):
        ids = [f'id="jaxinfer.{options.__name__}.{name}"' for name in options.__annotations__]
        assert [name for name in ids if name not in pages["api/generation.html"]] == []


@pytest.mark.slow
def test_dead_links_are_refused(tmp_path):
    links = ("nothing.md", "structure.md#nothing", "../pyproject.toml")
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("jaxinfer", "pallas_kernels", "sharding", "checkpoints"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs/features.md").open("a") as page:
        page.writelines(f"\n[dead]({link})\n" for link in links)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [link for link in links if f"'{link}'" not in done.stderr] == []


@pytest.mark.parametrize(
    ("html", "fetched"),
    [
        ('<script src="https://a.org/b.js"></script>', True),
        ("<link rel=stylesheet href=//fonts.org/a.css>", True),
        ('<a href="https://a.org">a</a><img src="a.svg">', False),
    ],
)
def test_what_is_fetched_is_found(html, fetched):
    assert bool(FETCHED.search(html)) == fetched
