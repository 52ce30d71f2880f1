"""What the commands are compared with."""

import pytest


@pytest.fixture(scope="session")
def llm(model_dir):
    """An engine of the sizes that commands are given here: its programs are compiled once for all of them."""
    from jaxinfer.generation import LLM

    return LLM(model_dir, max_batch=1)
