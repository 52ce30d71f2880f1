"""Calls that overlap: each is timed from when the device was free."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.compiled import DeviceTime


def test_a_call_begins_when_the_device_is_free():
    now = 0.0
    device = DeviceTime(lambda: now)
    now = 3.0
    assert device.end(1.0) == (1.0, 3.0)
    now = 5.0
    assert device.end(2.0) == (3.0, 5.0)  # sent while the other one ran
    now = 9.0
    assert device.end(8.0).seconds == 1.0
    assert device.free == 9.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1))
def test_calls_in_turn_are_timed_as_if_alone(calls):
    """Of a device that runs what it is sent one by one."""
    now, free = 0.0, 0.0
    device = DeviceTime(lambda: now)
    for sent, seconds in sorted(calls):
        now = free = max(free, sent) + seconds
        assert device.end(sent).seconds == pytest.approx(seconds)


def test_threads_count_no_second_twice():
    device = DeviceTime()
    begun = device.clock()
    with ThreadPoolExecutor(8) as pool:
        seconds = list(pool.map(lambda _: device.end(begun).seconds, range(1000)))
    assert min(seconds) >= 0
    assert sum(seconds) == pytest.approx(device.free - begun)
