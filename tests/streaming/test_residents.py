"""What stays in a memory of limited size, against a plain model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.streaming.residents import Residents

KEYS = "abcdef"


@settings(max_examples=100)
@given(
    budget=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "get", "pin", "unpin"]), st.sampled_from(KEYS), st.integers(1, 4))
    ),
)
def test_the_least_recently_used_without_pins_leave(budget, steps):
    residents, sizes, pins, order = Residents(budget), {}, {}, []
    for action, key, size in steps:
        if action == "add" and key not in sizes:
            pinned = sum(sizes[k] for k in sizes if pins.get(k))
            fits = pinned + size <= budget
            assert residents.add(key, key.upper(), size) == fits
            if fits:
                while sum(sizes.values()) + size > budget:
                    victim = next(k for k in order if not pins.get(k))
                    order.remove(victim)
                    del sizes[victim]
                sizes[key] = size
                order.append(key)
        elif action == "get":
            assert residents.get(key) == (key.upper() if key in sizes else None)
            if key in sizes:
                order.remove(key)
                order.append(key)
        elif action == "pin" and key in sizes:
            assert residents.pin(key) == key.upper()
            pins[key] = pins.get(key, 0) + 1
        elif action == "unpin":
            if pins.get(key):
                residents.unpin(key)
                pins[key] -= 1
                order.remove(key)
                order.append(key)
            else:
                with pytest.raises(ValueError, match="unpinned more often"):
                    residents.unpin(key)
        assert list(residents) == order
        residents.check_integrity()


def test_another_order():
    residents = Residents(2, order=lambda keys: sorted(keys, reverse=True))
    for key in "acb":
        assert residents.add(key, 0)
    assert list(residents) == ["a", "b"]


def test_the_last_one_may_be_too_large():
    residents = Residents(2, keeps_last=True)
    assert residents.add("small", 1)
    assert residents.add("large", 2, 5)
    assert list(residents) == ["large"]
    residents.pin("large")
    assert not residents.add("small", 1)
    residents.unpin("large")
    assert residents.add("small", 1)
    residents.clear()
    assert len(residents) == residents.used == 0
