"""The server's page in Chromium; pages.py says what users do."""

import re
from pathlib import Path

import pytest

from tests.browser.servers import serving_a_board

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCENARIOS = (
    "chat",
    "tools",
    "html",
    "stop",
    "completion",
    "errors",
    "key",
    "keyboard",
    "phone",
    "themes",
    "charts",
    "offline",
)


def test_every_scenario_is_run():
    source = (HERE / "pages.py").read_text()
    assert {*re.findall(r"^def (\w+)\(url\):", source, re.MULTILINE)} == {*SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_users_do(tool, page_server, scenario):
    assert tool("python", HERE / "pages.py", scenario, page_server.url, timeout=600).splitlines()[-1] == "ok"


def test_images_for_experts(tool, chromium, tmp_path):
    pytest.importorskip("jaxinfer.http.vision", reason="the server has no endpoints for experts")
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((96, 64), 80).convert("RGB").save(tmp_path / "board.png")
    with serving_a_board(tmp_path) as server:
        done = tool("python", HERE / "pages.py", "images", server.url, tmp_path / "board.png", timeout=600)
        assert done.splitlines()[-1] == "ok"
