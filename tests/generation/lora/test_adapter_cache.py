"""Which adapter is where on the device: against a plain model of pins and evictions, and where files are missing."""

import json
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.lora.peft import adapter_shapes, read_adapter
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG

NAMES = ("a", "b", "c", "d", "e")
RANK = 4
UP = "model.layers.0.mlp.up_proj"
ONE_ADAPTER = 4 * sum(rows * columns for rows, columns in adapter_shapes("tiny", CONFIG, RANK)["layers.0.mlp.gate_up"])


def save(folder, rank=2):
    return save_adapter(
        folder, {UP: random_pair(CONFIG.layer(0).mlp.hidden, CONFIG.embed, rank, np.random.default_rng(0))}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An adapter of one linear for each name; nobody changes them."""
    return {name: save(tmp_path_factory.mktemp("adapters") / name) for name in NAMES}


@pytest.fixture
def own(tmp_path):
    """The same, for a test that deletes their files."""
    return {name: save(tmp_path / name) for name in NAMES}


def cache_of(folders, *, size=2, held=5):
    """A cache that knows all adapters; host memory has room for `held` of them."""
    made = AdapterCache(size, RANK, held * ONE_ADAPTER, "tiny", CONFIG)
    for name, folder in folders.items():
        made.register(name, folder)
    return made


def delete_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


@settings(max_examples=60)
@given(
    size=st.integers(1, 3),
    held=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from(["pin", "unpin"]), st.sampled_from(NAMES)), max_size=40),
)
def test_pins_and_evictions_are_those_of_a_plain_model(folders, size, held, steps):
    under_test = cache_of(folders, size=size, held=held)
    pins, unused = (
        {},
        [],
    )  # name -> index of every request that has it; names that nobody has, released longest ago first
    device = {}
    for action, name in steps:
        if action == "unpin":
            if name in pins:
                under_test.unpin(name)
                pins[name].pop()
                if not pins[name]:
                    del pins[name]
                    unused.append(name)
            else:
                with pytest.raises(ValueError, match=f"'{name}' was unpinned more often"):
                    under_test.unpin(name)
        else:
            index = under_test.pin(name)
            uploads = under_test.take_uploads()
            resident = name in pins or name in unused
            assert (index is None) == (not resident and len(pins) == size)
            assert bool(uploads) == (index is not None and not resident)
            if index is not None:
                if not resident and len(pins) + len(unused) == size:
                    assert device[index].info.folder == folders[unused.pop(0)]
                elif not resident:
                    assert index not in device
                device.update(uploads)

                assert 1 <= index <= size
                assert device[index].info.folder == folders[name]
                assert set(pins.get(name, [index])) == {index}
                pins.setdefault(name, []).append(index)
                if name in unused:
                    unused.remove(name)
        under_test.check_integrity()


def test_an_upload_is_the_padded_adapter(folders):
    cache = cache_of(folders)
    index = cache.pin("c")
    [(place, adapter)] = cache.take_uploads()
    assert (place, adapter.max_rank) == (index, RANK)
    expected = read_adapter(folders["c"], "tiny", CONFIG, max_rank=RANK)
    assert adapter.layers.keys() == expected.layers.keys() == {"layers.0.mlp.gate_up"}
    for actual, wanted in zip(
        adapter.layers["layers.0.mlp.gate_up"], expected.layers["layers.0.mlp.gate_up"], strict=True
    ):
        np.testing.assert_array_equal(actual, wanted)


def test_who_waits_for_a_slot_reads_nothing(own):
    cache = cache_of(own, size=1)
    cache.pin("a")
    delete_weights(own["b"])
    assert cache.pin("b") is None
    assert cache.pin("a") == 1


def test_files_are_read_ahead_and_nobody_waits_who_need_not(own, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def slow(*args, **options):
        begun.set()
        assert may_end.wait(60)
        return read_adapter(*args, **options)

    monkeypatch.setattr("jaxinfer.generation.lora.cache.read_adapter", slow)
    cache = cache_of(own, size=2)
    cache.prefetch("a")
    assert begun.wait(60)
    assert cache.pin("a", wait=False) is None
    may_end.set()
    assert cache.pin("a") == 1
    delete_weights(own["a"])
    cache.prefetch("a")  # which it needs not
    cache.prefetch("unknown")
    cache.prefetch("b")
    assert cache.pin("b") == 2
    cache.check_integrity()


def wait_until_read(cache, name):
    until = time.monotonic() + 60
    while not cache._reading[name].done():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_has_been_read_ahead_makes_room_for_the_next(own):
    cache = cache_of(own, size=1)
    for name in ("a", "b"):
        cache.prefetch(name)
        wait_until_read(cache, name)
        delete_weights(own[name])
    assert cache.pin("a") == 1
    cache.unpin("a")
    assert cache.pin("b") == 1
    cache.check_integrity()


def test_what_cannot_be_read_ahead_is_an_error_of_who_needs_it(own):
    cache = cache_of(own)
    delete_weights(own["a"])
    cache.prefetch("a")
    wait_until_read(cache, "a")
    cache.prefetch("b")
    with pytest.raises(ValueError, match="adapter_model"):
        cache.pin("a")
    assert cache.pin("b") == 1
    cache.check_integrity()


def test_no_more_is_read_ahead_than_the_device_has_room_for(folders):
    cache = cache_of(folders, size=2, held=5)
    for name in NAMES:
        cache.prefetch(name)
    assert len(cache._reading) <= 2
    assert cache.pin("e") == 1
    cache.check_integrity()


def test_the_adapter_released_longest_ago_leaves(folders):
    cache = cache_of(folders, size=3)
    place = {name: cache.pin(name) for name in "abc"}
    for name in "bca":
        cache.unpin(name)
    cache.pin("c"), cache.unpin("c")  # used again: now a is older
    cache.take_uploads()
    assert cache.pin("d") == place["b"]
    assert cache.pin("e") == place["a"]
    assert cache.pin("c") == place["c"]
    assert [index for index, _ in cache.take_uploads()] == [place["b"], place["a"]]


def test_host_memory_spares_the_disk(own):
    cache = cache_of(own, size=1, held=2)

    def place(name):
        cache.take_uploads()
        assert cache.pin(name) == 1
        cache.unpin(name)
        assert [adapter.info.folder for _, adapter in cache.take_uploads()] == [own[name]]

    for name in "abc":  # a leaves host memory
        place(name)
        delete_weights(own[name])
    place("b")
    place("d")  # c was placed longest ago
    place("b")
    for name in "ac":
        with pytest.raises(ValueError, match=rf"{name}/adapter_model\.safetensors: no such file"):
            cache.pin(name)


def test_a_file_that_fails_changes_nothing(own):
    cache = cache_of(own)
    cache.pin("a"), cache.pin("b"), cache.unpin("a")
    cache.take_uploads()
    file = own["c"] / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ValueError, match=r"c/adapter_model\.safetensors: truncated or corrupt"):
        cache.pin("c")
    assert not cache.take_uploads()
    cache.check_integrity()
    assert cache.pin("a") is not None  # not evicted
    assert not cache.take_uploads()
    cache.unpin("a")
    file.write_bytes(content)
    assert cache.pin("c") is not None


def test_a_rank_that_grew_since_registration(own):
    cache = cache_of(own)
    save(own["a"], rank=RANK + 1)
    with pytest.raises(ValueError, match="rank 5 is more than the 4 that are reserved"):
        cache.pin("a")


@pytest.mark.parametrize("ahead", [False, True])
def test_files_that_changed_are_refused_and_equal_ones_are_not(own, ahead):
    cache = cache_of(own, size=1, held=0)

    def place(name):
        if ahead:
            cache.prefetch(name)
        assert cache.pin(name) == 1
        cache.unpin(name)

    place("a"), place("b")
    save(own["a"])  # the same again
    place("a"), place("b")
    config = own["a"] / "adapter_config.json"
    written = config.read_text()
    config.write_text(json.dumps(json.loads(written) | {"lora_alpha": 16}))
    with pytest.raises(ValueError, match=r"/a: has changed since adapter 'a' was first read; restore its files"):
        place("a")
    cache.check_integrity()
    cache.reset()
    with pytest.raises(ValueError, match="has changed"):
        place("a")
    config.write_text(written)
    place("a")


def test_registration(tmp_path):
    cache = cache_of({}, size=1)
    with pytest.raises(ValueError, match="unknown adapter 'a'; known: none"):
        cache.check("a")
    folder = save(tmp_path / "a")
    delete_weights(folder)  # not read yet
    cache.register("a", folder)
    cache.check("a")
    for ask in (cache.check, cache.pin):
        with pytest.raises(ValueError, match="unknown adapter 'b'; known: a"):
            ask("b")
    with pytest.raises(ValueError, match=r"adapter 'a' is .*/a already; choose another name"):
        cache.register("a", save(tmp_path / "other"))
    with pytest.raises(ValueError, match="rank 32 is more than the 4 that are reserved; raise max_lora_rank to 32"):
        cache.register("large", save(tmp_path / "large", rank=32))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: use_dora=True is not implemented"):
        cache.register("dora", folder)


@pytest.mark.parametrize("sizes", [{"size": 0}, {"max_rank": 0}])
def test_sizes(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}=0: adapters need at least 1"):
        AdapterCache(**{"size": 1, "max_rank": 1, "host_bytes": 0, "family": "tiny", "config": CONFIG} | sizes)


def test_a_checked_adapter_has_the_name_of_its_content(tmp_path):
    cache, folder = cache_of({}), save(tmp_path / "f")
    first = cache.register_checked("f", folder)
    assert first.startswith("f@")
    assert cache.names == []
    assert cache.register_checked("f", shutil.copytree(folder, tmp_path / "g")) == first
    save(folder, rank=3)
    second = cache.register_checked("f", folder)
    assert second != first
    assert cache.pin(first) == 1  # from its new folder
    assert cache.pin(second) == 2
    with pytest.raises(ValueError, match="no such file"):
        cache.register_checked("f", tmp_path)
