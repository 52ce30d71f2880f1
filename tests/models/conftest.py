import pytest

from jaxinfer.checkpoints import reading


@pytest.fixture
def asked(monkeypatch):
    """How many elements are asked of leaves on disk, one number for each part that a device reads."""
    read, asked = reading._read_part, []

    class Asked:
        """A leaf on disk, and how many elements are asked of it."""

        def __init__(self, store):
            self._store, self.shape, self.dtype = store, store.shape, store.dtype

        def __getitem__(self, index):
            view = self._store[index]
            asked.append(view.size)
            return view

        @property
        def oindex(self):
            return Outer(self._store)

    class Outer(Asked):
        def __init__(self, store):
            self._store = store.oindex

    monkeypatch.setattr(reading, "_read_part", lambda store, part, takes: read(Asked(store), part, takes))
    return asked
