"""The server of the page, and Chromium to open it."""

import shutil

import pytest

from tests.browser.servers import serving_the_page
from tests.conformance.conftest import tool

__all__ = ["tool"]  # a fixture


@pytest.fixture(scope="session")
def chromium():
    if shutil.which("chromium") is None:
        pytest.skip("the page's tests need Debian's package chromium")


@pytest.fixture(scope="session")
def page_server(chromium, tmp_path_factory):
    with serving_the_page(tmp_path_factory.mktemp("page")) as server:
        yield server
