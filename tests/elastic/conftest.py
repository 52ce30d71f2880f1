"""A service with a task, made once: tests that change it make their own."""

import pytest


@pytest.fixture(scope="session")
def options(service_options):
    """Of services."""
    return service_options


@pytest.fixture(scope="session")
def service(vit, registered, options):
    """A service that has read the repository."""
    from jaxinfer.elastic import Service

    return Service.from_checkpoint(vit, repository=registered, **options)


@pytest.fixture(autouse=True)
def one_penalty(monkeypatch):
    """Fit a head twice instead of five times, with the same penalty; `registered` has chosen among several."""
    monkeypatch.setattr("jaxinfer.elastic.tasks.training._PENALTIES", (1e-2,))
