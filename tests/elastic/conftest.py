"""A service with a task, made once: tests that change it make their own."""

import pytest


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """The model directory of `vits`."""
    from tests.elastic.vits import save_vit

    return save_vit(tmp_path_factory.mktemp("vits") / "vit")


@pytest.fixture(scope="session")
def options():
    """Of services: few programs."""
    return {"merge_levels": (-4,), "max_batch": 2, "max_tasks": 2, "max_classes": 3, "schedule": "constant"}


@pytest.fixture(scope="session")
def registered(vit, tmp_path_factory, options):
    """A repository with the task "stripes", with 2 prompts."""
    from jaxinfer.elastic import Service, TrainingConfig
    from tests.elastic.vits import stripes

    folder = tmp_path_factory.mktemp("tasks")
    service = Service.from_checkpoint(vit, repository=folder, **options)
    service.register_task("stripes", stripes(), prompts=[2], training=TrainingConfig(steps=40, batch=16))
    return folder


@pytest.fixture(scope="session")
def service(vit, registered, options):
    """A service that has read it."""
    from jaxinfer.elastic import Service

    return Service.from_checkpoint(vit, repository=registered, **options)
