"""Pages of the prefix cache on disk, alone and behind the host's memory."""

import numpy as np
import pytest

from jaxinfer.compiled import Costs
from jaxinfer.disk_cache.blocks import KEY_BYTES, BlockFolder
from jaxinfer.futures import InterruptibleFuture
from jaxinfer.generation.engine.disk_pages import READ_PAGE_FROM_DISK, DiskPages
from jaxinfer.generation.engine.host_and_disk import HostAndDisk
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages
from jaxinfer.generation.engine.page_tier import MAX_WRITES, bytes_of_page, parts_of
from tests.generation.engine.test_host_pages import BUCKETS, PAGE, empty_block, fill

SIZE = bytes_of_page(PAGE)
KEYS = [bytes([number]) * KEY_BYTES for number in range(9)]
ROOM = MAX_WRITES * BUCKETS.moves[-1]


@pytest.fixture
def blocks(tmp_path):
    return BlockFolder.open(tmp_path / "kv", max_bytes=20 * (SIZE + 4))


@pytest.fixture
def disk(blocks):
    return DiskPages(blocks, PAGE, BUCKETS, Costs())


@pytest.fixture
def both(disk):
    return HostAndDisk(HostPages(3, PAGE, BUCKETS, Costs()), disk)


def put(tier, *numbers):
    """Store pages with these numbers, by the keys of these numbers."""
    made = [empty_block(size) for size in BUCKETS.moves_of(len(numbers))]
    for index, number in enumerate(numbers):
        fill(made[index // 4], index % 4, number)
    tier.put([KEYS[number] for number in numbers], made)


def check(load, *numbers):
    """A load has pages of these numbers."""
    block, count = load.result.result(60)
    assert count == len(numbers)
    expected = empty_block(max(count, 1))
    for index, number in enumerate(numbers):
        fill(expected, index, number)
    for found, wanted in zip(parts_of(block), parts_of(expected), strict=True):
        np.testing.assert_array_equal(found[:, :count], wanted[:, :count])


def keys(*numbers):
    return [KEYS[number] for number in numbers]


def test_pages_outlive_the_process(disk, blocks):
    put(disk, 0, 1, 2, 3, 4)
    assert all(key in disk for key in KEYS[:5])
    assert not disk.wants_early(KEYS[4])
    check(disk.get(keys(4, 0, 2)), 4, 0, 2)
    disk.close()
    later = DiskPages(BlockFolder.open(blocks.folder, max_bytes=blocks.max_bytes), PAGE, BUCKETS, Costs())
    check(later.get(keys(0, 1, 2, 3, 4)), 0, 1, 2, 3, 4)
    later.admitted(later.get(keys(0)), keys(0))
    stats = later.stats["disk_kv"]
    assert (stats.pages, stats.num_pages, stats.stored, stats.read_back, stats.hits) == (5, 20, 0, 1, 1)
    assert disk.stats["disk_kv"].stored_bytes == 5 * SIZE
    later.close()


def test_a_load_ends_at_the_first_page_that_is_damaged(disk, blocks):
    put(disk, 0, 1, 2)
    disk.settle()
    (blocks.folder / KEYS[1].hex()).write_bytes(b"?")
    check(disk.get(keys(0, 1, 2)), 0)
    assert KEYS[1] not in disk
    check(disk.get(keys(1)))  # another load, which was begun before
    put(disk, 1)
    check(disk.get(keys(0, 1, 2)), 0, 1, 2)


def test_pages_that_come_too_fast_are_left_out(disk, monkeypatch):
    monkeypatch.setattr(disk._worker, "submit", lambda *_: InterruptibleFuture(list))  # a disk that has stopped
    for number in range(7):
        put(disk, number)  # in blocks of two pages
    assert disk.has_room
    disk.put(KEYS[7:], [empty_block(ROOM)])
    assert not disk.has_room
    late = bytes(KEY_BYTES - 1) + b"?"
    disk.put([late], [empty_block(2)])
    assert [key in disk for key in [*KEYS, late]] == [True] * 9 + [False]
    assert disk.wants_early(late)
    assert not disk.wants(late)


def test_pages_come_from_the_host_if_it_has_them(both):
    put(both, 0, 1, 2, 3)  # the host has room for three
    assert both.reads(keys(0, 1, 2, 3)) == {READ_PAGE: 3, READ_PAGE_FROM_DISK: 1}
    load = both.get(keys(0, 1, 2, 3))
    check(load, 0, 1, 2, 3)
    both.admitted(load, keys(0, 1, 2))
    assert {name: stats.read_back for name, stats in both.stats.items()} == {"host_kv": 2, "disk_kv": 1}
    load = both.get(keys(1, 2))
    check(load, 1, 2)
    both.admitted(load, keys(1, 2))
    assert both.stats["disk_kv"].hits == 1
    both.free_memory()
    check(both.get(keys(3, 2, 1)), 3, 2, 1)


def test_a_page_from_disk_goes_to_the_host_when_it_gives_way(both):
    put(both, 0, 1, 2, 3)
    assert (both.wants(KEYS[0]), both.wants(KEYS[3])) == (True, False)
    assert not both.wants_early(KEYS[0])
    put(both, 0)
    assert KEYS[0] in both.host
    both.settle()
    assert both.stats["disk_kv"].stored == 4
    both.close()
