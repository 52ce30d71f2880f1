"""Systems of tiny experts whose buffers are overwritten once nothing uses them."""

import functools

import pytest


@pytest.fixture
def start(board, monkeypatch):
    """Start a system as `boards.config` describes it; it is closed at the end of the test."""
    from jaxinfer.checkpoints.stores import Staging
    from jaxinfer.experts import System, opened
    from tests.experts.boards import AnyProfiles, config

    monkeypatch.setattr(opened, "Staging", functools.partial(Staging, on_release=lambda buffer: buffer.fill(255)))
    systems = []

    def made(*names, folder=board, costs=None, **changes):
        given = [names] if names else []
        profiles = AnyProfiles() if costs is None else AnyProfiles(costs)
        systems.append(System(config(folder, *given, **changes), profiles=profiles))
        return systems[-1]

    yield made
    for system in systems:
        system.close(drain=False, timeout=5)
