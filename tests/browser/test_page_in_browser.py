"""The server's page in Chromium; pages.py says what users do."""

import re
from pathlib import Path

import pytest

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
