"""A model behind the server's application, for all tests of HTTP."""

import pytest

from tests.generation.conftest import PLAIN


@pytest.fixture(scope="session")
def async_llm(model_dir):
    """A model with few programs, which tests ask through HTTP and beside it."""
    from jaxinfer import AsyncLLM
    from tests.generation.few_programs import few_programs

    with few_programs():
        llm = AsyncLLM(model_dir, max_waiting=64, **PLAIN)
    yield llm
    llm.close()


@pytest.fixture
def client(async_llm):
    """Asks the application."""
    from jaxinfer import http
    from tests.http.asgi import Client

    return Client(http.app(async_llm, name="tiny"))
