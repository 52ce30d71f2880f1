"""Systems of tiny experts whose buffers are overwritten once nothing uses them."""

import functools
import os

import pytest


@pytest.fixture
def start(board, monkeypatch):
    """Start a system as `boards.config` describes it; it is closed at the end of the test.

    preadv, scheduler_type: those of `OpenedSystem`.
    """
    from jaxinfer.checkpoints.stores import Staging
    from jaxinfer.experts import OpenedSystem, System, opened
    from jaxinfer.experts.scheduling.scheduler import Scheduler
    from tests.experts.boards import AnyProfiles, config

    monkeypatch.setattr(opened, "Staging", functools.partial(Staging, on_release=lambda buffer: buffer.fill(255)))
    systems = []

    def made(*names, folder=board, costs=None, preadv=os.preadv, scheduler_type=Scheduler, **changes):
        given = [names] if names else []
        profiles = AnyProfiles() if costs is None else AnyProfiles(costs)
        experts = OpenedSystem(config(folder, *given, **changes), preadv=preadv, scheduler_type=scheduler_type)
        systems.append(System(experts, profiles=profiles))
        return systems[-1]

    yield made
    for system in systems:
        system.close(drain=False, timeout=5)
