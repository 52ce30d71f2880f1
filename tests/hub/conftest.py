"""A hub on this machine, with the cache folders of each test its own."""

from pathlib import Path

import huggingface_hub.constants as constants
import pytest

from tests.hub.server import Hub, files_of, serving

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def tiny():
    """The Hugging Face directory that is `org/tiny`."""
    return GOLDENS / "llama_llama3"


@pytest.fixture
def hub(tmp_path, monkeypatch, tiny):
    """A hub with `org/tiny`; it is the one of this process, as `use` makes it."""
    with serving(Hub(repositories={"org/tiny": files_of(tiny)})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub
