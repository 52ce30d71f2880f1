"""Costs that follow what is seen: noise changes nothing, a slow spell counts while it lasts."""

import pytest

from jaxinfer.compiled.drift import NEWEST
from jaxinfer.experts.execution.observed import FORGET, LEAST, LoadTimes, ObservedProfiles
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.request import Load

KEY = ("resnet", "cpu")
MEASURED = Profile(k=1.0, b=2.0, max_batch=2, load={"disk": 10.0, "host": 1.0}, evict=2.0, latency={1: 3.0, 2: 4.0})


def test_follows_a_slow_spell_and_its_end():
    profiles = ObservedProfiles({KEY: MEASURED})
    for _ in range(NEWEST):
        profiles.note_load(KEY, "disk", 20.0)
        profiles.note_batch(KEY, 1, 6.0)
        profiles.note_eviction(KEY, 5.0)
    slow = profiles[KEY]
    assert slow.load == {"disk": 20.0, "host": 1.0}
    assert (slow.k, slow.b, slow.latency, slow.evict) == (2.0, 4.0, {1: 6.0, 2: 8.0}, 5.0)
    for _ in range(NEWEST):
        profiles.note_load(KEY, "disk", 10.0)
        profiles.note_batch(KEY, 2, 4.0)
        profiles.note_eviction(KEY, 2.0)
    assert profiles[KEY] == MEASURED


@pytest.mark.parametrize("seen", [[1000.0, 10.0, 10.0] * NEWEST, [10.5] * NEWEST, [20.0] * (LEAST - 1), [0.0] * NEWEST])
def test_noise_changes_nothing(seen):
    profiles = ObservedProfiles({KEY: MEASURED})
    for seconds in seen:
        profiles.note_load(KEY, "disk", seconds)
    assert profiles[KEY] is MEASURED


def test_what_has_not_been_seen_for_long_is_forgotten():
    """Copies that were slow are made no more, so that none would show that they are fast again."""
    now = 0.0
    profiles = ObservedProfiles({KEY: MEASURED}, clock=lambda: now)
    for _ in range(NEWEST):
        profiles.note_eviction(KEY, 20.0)
        profiles.note_batch(KEY, 1, 6.0)
    now = FORGET
    profiles.note_batch(KEY, 1, 6.0)
    assert (profiles[KEY].evict, profiles[KEY].k) == (20.0, 2.0)
    now = FORGET + 1
    profiles.note_batch(KEY, 1, 6.0)
    assert (profiles[KEY].evict, profiles[KEY].k) == (2.0, 2.0)
    profiles.note_eviction(KEY, 20.0)
    assert profiles[KEY].evict == 2.0


def test_is_the_mapping_of_what_was_measured():
    profiles = ObservedProfiles({KEY: MEASURED})
    assert dict(profiles) == {KEY: MEASURED}
    assert len(profiles) == 1
    assert profiles.get(("x", "cpu")) is None


def test_loads_at_the_same_time_share_it():
    """One of 10 s beside which another one runs for its last 4 s, and 3 s more."""
    first, second = (Load(executor=0, pool=0, expert=name, tier="disk") for name in "ab")
    times = LoadTimes()
    times.begin(first, 100.0)
    times.begin(second, 106.0)
    assert times.end(first, 110.0) == 8.0
    assert times.end(second, 113.0) == 5.0
