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


@pytest.fixture(scope="session")
def agent_dir(tmp_path_factory):
    """A model whose chat template knows tools and reasoning, with room for them."""
    import dataclasses

    from tests.tiny import AGENT_TEMPLATE, ONE_KIND, save_tiny

    config = dataclasses.replace(ONE_KIND, context=4096, layers=1)
    return save_tiny(tmp_path_factory.mktemp("models") / "agent", config=config, chat_template=AGENT_TEMPLATE)


@pytest.fixture(scope="session")
def agent_llm(agent_dir):
    """A model that calls tools and reasons."""
    from jaxinfer import AsyncLLM
    from tests.generation.few_programs import few_programs

    with few_programs():
        options = {"max_batch": 4, "token_budget": 256, "chunk_size": 256, "trust_request_chat_template": True}
        llm = AsyncLLM(agent_dir, max_waiting=64, **options)
    yield llm
    llm.close()


@pytest.fixture
def client(async_llm):
    """Asks the application."""
    from jaxinfer import http
    from tests.http.asgi import Client

    return Client(http.app(async_llm, name="tiny"))
