import pytest

from jaxinfer.generation import LLM


@pytest.fixture(scope="session")
def llm(model_dir):
    return LLM(model_dir, max_batch=4)
